"""Group nodes, in the order of the user's code, into layers: one for each call of an innermost module."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.fx
from torch import nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.expectations import expect_count
from funcpipe.model.graph.observe import NodeRecord
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.replicated_values import needed, replicated_reads
from funcpipe.model.graph.values import Layer

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
    reads = replicated_reads(module.graph)
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
