"""Group nodes, in the order of the user's code, into layers, one for each call of an innermost module, and find the
values that one layer computes and later ones read. Values that follow from constants and free sizes alone are not sent:
every stage computes them for itself.
"""

import itertools
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.node_functions import EXPECTATIONS, expect_count
from funcpipe.model.graph.observations import NodeRecord, TensorFacts
from funcpipe.model.graph.program import attribute, is_number
from funcpipe.model.graph.values import Crossing, Layer, Value

Nodes = tuple[torch.fx.Node, torch.fx.Node]


def layers_of(
    module: torch.fx.GraphModule,
    model: nn.Module,
    outputs: Sequence[Any],
    records: Mapping[str, NodeRecord],
    inseparable: Iterable[Nodes],
) -> tuple[Layer, ...]:
    """The layers of a traced `model`, in an order in which they can run.

    Each call of a module without children (or one that was traced whole) begins a layer; the operations between such
    calls belong to the layer before them, those ahead of the first call to the first layer. Code that reads many
    parameters by itself is divided where it reads the next one. An item of a tuple belongs to the layer that made the
    tuple. Replicated nodes belong to every layer that uses them. No boundary separates the two nodes of a pair in
    `inseparable`.
    """
    _move_items(module.graph, records)
    nodes = [node for node in module.graph.nodes if node.op in _WORK and not node.meta.get("replicated")]
    if not nodes:
        raise ModelError(
            f"{type(model).__name__} computes nothing that can be trained: its graph is empty; pass the "
            "module that holds the parameters"
        )
    title = type(model).__name__
    groups = _merged(_divided(_groups(nodes, title), module, title), inseparable)
    reads = _replicated_reads(module.graph)
    layers = []
    for i, (name, members) in enumerate(groups):
        used = [item for node in members for item in node.all_input_nodes]
        if i == len(groups) - 1:
            used += [item for item in outputs if isinstance(item, torch.fx.Node)]
        read = needed(reads, used)
        inputs = dict.fromkeys(item.meta["input"] for item in used if "input" in item.meta)
        changes = frozenset(name for node in members for name in records[node.name].written)
        layers.append(Layer(name, (*read, *members), tuple(inputs), changes))
    return tuple(layers)


_WORK = ("call_module", "call_function", "call_method")


def _move_items(graph: torch.fx.Graph, records: Mapping[str, NodeRecord]) -> None:
    """Move each constant item of a tuple or mapping directly behind the node that it is an item of, and what checks how
    many there are before these.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.getitem:
            continue
        whole, key = node.args
        if (
            isinstance(whole, torch.fx.Node)
            and isinstance(key, int | str)
            and records[whole.name].tree.build is not None
        ):
            whole.append(node)
            node.meta["call"] = whole.meta.get("call")
    for node in list(graph.nodes):
        if node.target is expect_count:
            node.args[0].append(node)
            node.meta["call"] = node.args[0].meta.get("call")


def _groups(nodes: Sequence[torch.fx.Node], title: str) -> list[tuple[str, list[torch.fx.Node]]]:
    """`nodes` in groups, each beginning with a call of an innermost module and named after it.

    What belongs to an earlier call, such as an item of its result that is read late, is put there, if all that it reads
    is there too; the nodes that follow it are not.
    """
    calls = [node.meta.get("call") for node in nodes]
    current = _Call(*next((call for call in calls if call is not None), (title, None)))
    numbers: dict[_Call, int] = {}
    times: Counter[str] = Counter()
    groups: list[tuple[str, list[torch.fx.Node]]] = []
    places: dict[torch.fx.Node, int] = {}
    for node, call in zip(nodes, calls, strict=True):
        chosen = current if call is None else _Call(*call)
        if chosen not in numbers:
            numbers[chosen] = len(groups)
            times[chosen.path] += 1
            number = times[chosen.path]
            groups.append((chosen.path if number == 1 else f"{chosen.path}#{number}", []))
        elif any(places.get(item, 0) > numbers[chosen] for item in node.all_input_nodes):
            chosen = current
        if numbers[chosen] >= numbers.get(current, 0):
            current = chosen
        places[node] = numbers[chosen]
        groups[places[node]][1].append(node)
    return groups


class _Call(NamedTuple):
    """A call of the module at `path`; `key` tells it from other calls of that module."""

    path: str
    key: Any


def _divided(
    groups: list[tuple[str, list[torch.fx.Node]]], module: torch.fx.GraphModule, title: str
) -> list[tuple[str, list[torch.fx.Node]]]:
    """`groups`, where one that reads several large parameters itself, such as those of a ParameterList, is divided.

    Each of the parts begins where a further one is read, and is named after that. Modules that are called several
    times stay whole.
    """
    repeated = {name.partition("#")[0] for name, _ in groups if "#" in name}
    divided: list[tuple[str, list[torch.fx.Node]]] = []
    for name, members in groups:
        starts = {} if name.partition("#")[0] in repeated else _large_reads(members, module)
        divided.append((next(iter(starts.values())) if starts and name == title else name, []))
        found = False
        for node in members:
            if node in starts and found:
                divided.append((starts[node], []))
            found = found or node in starts
            divided[-1][1].append(node)
    return divided


_MANY = 3


def _large_reads(members: Sequence[torch.fx.Node], module: torch.fx.GraphModule) -> dict[torch.fx.Node, str]:
    """The nodes that are the first to read a large parameter, and its name; nothing if these are but a few.

    A parameter is large if it has two dimensions or more, and a tenth of the elements of the largest one.
    """
    first: dict[str, torch.fx.Node] = {}
    sizes: dict[str, int] = {}
    for node in members:
        for used in node.all_input_nodes:
            item = attribute(module, str(used.target)) if used.op == "get_attr" else None
            if isinstance(item, nn.Parameter) and item.dim() > 1:
                first.setdefault(str(used.target), node)
                sizes[str(used.target)] = item.numel()
    large = [name for name, size in sizes.items() if 10 * size >= max(sizes.values())]
    return {first[name]: name for name in large} if len(large) >= _MANY else {}


def _merged(
    groups: list[tuple[str, list[torch.fx.Node]]], inseparable: Iterable[Nodes]
) -> list[tuple[str, list[torch.fx.Node]]]:
    """`groups`, where those between the two nodes of a pair are one, under the name of the first."""
    number = {node: i for i, (_, members) in enumerate(groups) for node in members}
    no_cut: set[int] = set()  # groups that no boundary may precede
    for pair in inseparable:
        ends = sorted(number[node] for node in pair if node in number)
        no_cut.update(range(ends[0] + 1, ends[-1] + 1) if ends else ())
    joined: list[tuple[str, list[torch.fx.Node]]] = []
    for i, (name, members) in enumerate(groups):
        if i in no_cut:
            joined[-1][1].extend(members)
        else:
            joined.append((name, list(members)))
    return joined


Reads = Mapping[torch.fx.Node, Sequence[torch.fx.Node]]


def mark_replicated(module: torch.fx.GraphModule, records: Mapping[str, NodeRecord], changed: Collection[int]) -> None:
    """Set `replicated` in the meta of the nodes that every layer computes for itself instead of receiving their values.

    These are the attributes of the model, and the results of operators on buffers, constants and free sizes that
    draw no random numbers and mutate nothing. `changed` are the identities of buffers that a forward changes, as by a
    module: what reads one must run at its place, and in the stage that changes it.
    """
    written = {name for item in records.values() for name in item.written}
    constant: set[torch.fx.Node] = set()  # what other replicated nodes may read
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["replicated"] = True
            item = attribute(module, str(node.target))
            fixed = isinstance(item, Tensor) and not isinstance(item, torch.nn.Parameter)
            if fixed and node.name not in written and id(item) not in changed:
                constant.add(node)
        elif "symbol" in node.meta:
            constant.add(node)
        elif constant.issuperset(node.all_input_nodes) and _is_pure(node, records, written):
            node.meta["replicated"] = True
            constant.add(node)


def _replicated_reads(graph: torch.fx.Graph) -> Reads:
    """The replicated nodes of `graph`, and for each those that it reads."""
    reads: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.meta.get("replicated"):
            reads[node] = [used for used in node.all_input_nodes if used in reads]
    return reads


def needed(reads: Reads, nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Those of `nodes` that are replicated and what they read, directly or through others, in topological order."""
    found: dict[torch.fx.Node, None] = {}
    for source in nodes:
        stack = [source] if source in reads else []
        while stack:
            if missing := [used for used in reads[stack[-1]] if used not in found]:
                stack.extend(reversed(missing))
            else:
                found[stack.pop()] = None
    return list(found)


def _is_pure(node: torch.fx.Node, records: Mapping[str, NodeRecord], written: set[str]) -> bool:
    if node.op not in ("call_function", "call_method") or node.target in EXPECTATIONS:
        return False
    item = records[node.name]
    return not item.draws and not item.changes and node.name not in written


def crossings_of(
    layers: Sequence[Layer], outputs: Sequence[Any], records: Mapping[str, NodeRecord]
) -> tuple[tuple[Crossing, ...], tuple[Value, ...]]:
    """The nodes that later layers read, and a Value for each tensor or number among their leaves.

    The last layer counts as a reader of the model's outputs.
    """
    readers = _readers(layers, outputs)
    names = set[str]()
    crossings, values = [], []
    for i, layer in enumerate(layers):
        for node in layer.nodes:
            consumers = tuple(reader for reader in readers.get(node.name, ()) if reader > i)
            if node.meta.get("replicated") or not consumers:
                continue
            base = _unique(layer.name if node.op == "call_module" else node.name, names)
            crossing, made = _crossing(base, node.name, (i, consumers), records[node.name])
            crossings.append(crossing)
            values += made
    return tuple(crossings), tuple(values)


def _readers(layers: Sequence[Layer], outputs: Sequence[Any]) -> dict[str, list[int]]:
    """The layers that read each node's value, in ascending order."""
    readers: dict[str, dict[int, None]] = {}
    for i, layer in enumerate(layers):
        for node in layer.nodes:
            for used in node.all_input_nodes:
                readers.setdefault(used.name, {})[i] = None
    for node in outputs:
        if isinstance(node, torch.fx.Node):
            readers.setdefault(node.name, {})[len(layers) - 1] = None
    return {name: list(found) for name, found in readers.items()}


def _crossing(
    base: str, node: str, ends: tuple[int, tuple[int, ...]], record: NodeRecord
) -> tuple[Crossing, list[Value]]:
    producer, consumers = ends
    values = []
    names: list[str | None] = []
    constants: list[object] = []
    for path, leaf in zip(record.tree.paths(base), record.leaves, strict=True):
        scalar = is_number(leaf)
        moves = scalar or isinstance(leaf, TensorFacts)
        names.append(path if moves else None)
        constants.append(None if moves else leaf)
        if moves:
            facts = TensorFacts((), (), torch.tensor(leaf).dtype, False) if scalar else leaf
            value = Value(
                path,
                producer,
                consumers,
                facts.requires_grad,
                facts.shape,
                facts.dtype,
                facts.stride,
                facts.symbols,
                scalar,
            )
            values.append(value)
    return Crossing(node, producer, consumers, record.tree, tuple(names), tuple(constants)), values


def _unique(name: str, taken: set[str]) -> str:
    """`name`, with a number if it is `taken`; it is so from now on."""
    numbered = (f"{name}:{number}" for number in itertools.count(2))
    found = next(one for one in itertools.chain([name], numbered) if one not in taken)
    taken.add(found)
    return found
