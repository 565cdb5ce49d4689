"""Assemble a LayerGraph from a traced graph.

- `cleanup` drops dead nodes, and reads tied parameters under the name nearest to the module that uses them.
- `_mark_draws` numbers the calls that draw random numbers: by these numbers they are seeded.
- `resolve_sizes` (of `sizes`) computes sizes from the free sizes of the inputs.
- `_functionalize` has what reads a tensor after a write depend on the node that wrote.
- `layers_of` (of `layering`) groups the nodes into layers; `crossings_of` finds the values that pass between them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx.graph_module import _assign_attr

from funcpipe.errors import ModelError
from funcpipe.model.draws import GENERATORS, Draws, is_from_torch, module_draw, operator_draw
from funcpipe.model.graph.inputs import InputChecks
from funcpipe.model.graph.layering import crossings_of, layers_of, mark_replicated
from funcpipe.model.graph.node_functions import identity
from funcpipe.model.graph.observations import NodeRecord, TensorFacts
from funcpipe.model.graph.program import WHOLE, attribute, is_inside
from funcpipe.model.graph.sizes import InputSizes, resolve_sizes
from funcpipe.model.graph.symbols import BATCH, Symbols
from funcpipe.model.graph.tracers import Traced, TraceRequest
from funcpipe.model.graph.values import LayerGraph
from funcpipe.model.tensors import named_tensors


def assemble(
    request: TraceRequest,
    traced: Traced,
    runs: Sequence[dict[str, NodeRecord]],
    symbols: Symbols,
    inputs: Mapping[str, Tensor],
    batched: Collection[str],
    stateful: Collection[str],
) -> LayerGraph:
    """The layers of a `traced` model and what passes between them, for a sample's `inputs`.

    `runs` are the records of its nodes for the runs that `symbols` knows; `stateful` are the modules with attributes
    that a forward leaves for the next one. The first dimension of the inputs `batched` is the batch.
    """
    model, module = request.model, traced.module
    _mark_draws(module, runs)
    records = {name: symbols.at_sample([run[name] for run in runs]) for name in runs[0]}
    outputs, sizes = resolve_sizes(module, traced.outputs, runs, symbols, records)
    outputs, inseparable = _functionalize(module, outputs, records)
    changed = {id(attribute(model, name)) for name in request.changed}
    mark_replicated(module, records, changed)
    inseparable += _same_state(module, changed, stateful)
    inseparable += _not_sent(module, outputs, records)
    layers = layers_of(module, model, outputs, records, inseparable)
    crossings, values = crossings_of(layers, outputs, records)
    return LayerGraph(
        name=type(model).__name__,
        module=module,
        layers=layers,
        values=values,
        inputs=request.signature.tensors,
        batched=tuple(name for name in inputs if name in batched),
        signature=replace(request.signature, checks=_checks(traced, sizes, symbols, inputs, batched)),
        crossings=crossings,
        outputs=outputs,
        output_tree=traced.output_tree,
        state=frozenset(named_tensors(model)),
        training={name: part.training for name, part in model.named_modules()},
        notes=traced.notes,
        output_sizes=_output_sizes(outputs, records),
    )


def _output_sizes(outputs: Sequence[Any], records: Mapping[str, NodeRecord]) -> frozenset[str]:
    leaves = [leaf for node in outputs if isinstance(node, torch.fx.Node) for leaf in records[node.name].leaves]
    facts = [leaf for leaf in leaves if isinstance(leaf, TensorFacts)]
    return frozenset(name for leaf in facts for name in leaf.symbols if name is not None)


def _checks(
    traced: Traced, sizes: InputSizes, symbols: Symbols, inputs: Mapping[str, Tensor], batched: Collection[str]
) -> InputChecks:
    """The assumptions of the graph about its inputs: those in `sizes`, and those of the tracer."""
    free = {(symbol.source, symbol.dim): symbol.name for symbol in symbols.free}
    expected: dict[str, tuple[int | str | None, ...]] = {}
    for name, tensor in inputs.items():
        found: list[int | str | None] = []
        for dim, size in enumerate(tensor.shape):
            own = BATCH if dim == 0 and name in batched else free.get((name, dim))
            claimed = sizes.get(name, {}).get(dim, own)
            found.append(size if dim in traced.fixed.get(name, ()) else claimed)
        expected[name] = tuple(found)
    return InputChecks(
        dtypes={name: tensor.dtype for name, tensor in inputs.items()},
        shapes={name: tuple(tensor.shape) for name, tensor in inputs.items()},
        sizes=expected,
        guards=traced.guards,
    )


def _same_state(
    module: torch.fx.GraphModule, changed: Collection[int], stateful: Collection[str]
) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """The first and the last node that change each buffer, or the attributes of each module: a cut between them would
    leave two stages with half of the updates. `changed` are the buffers' identities.
    """
    first: dict[Any, torch.fx.Node] = {}
    last: dict[Any, torch.fx.Node] = {}
    for node in module.graph.nodes:
        for key in (*_buffers_of(node, module, changed), *_modules_of(node, stateful)):
            first.setdefault(key, node)
            last[key] = node
    return [(first[key], last[key]) for key in first if first[key] is not last[key]]


def _not_sent(
    module: torch.fx.GraphModule, outputs: Sequence[Any], records: Mapping[str, NodeRecord]
) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """The nodes whose values cannot be sent, with each node that reads them; the last stage reads the outputs."""
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    found = []
    for node in nodes:
        facts = [leaf for leaf in records[node.name].leaves if isinstance(leaf, TensorFacts)]
        if not node.meta.get("replicated") and not all(leaf.dense for leaf in facts):
            readers = [*node.users, *[nodes[-1]] * any(item is node for item in outputs)]
            found += [(node, reader) for reader in readers]
    return found


def _buffers_of(node: torch.fx.Node, module: torch.fx.GraphModule, changed: Collection[int]) -> list[int]:
    if node.op == "call_module":
        held = list(attribute(module, str(node.target)).buffers())
    else:
        held = [attribute(module, str(used.target)) for used in node.all_input_nodes if used.op == "get_attr"]
    return [id(item) for item in held if id(item) in changed]


def _modules_of(node: torch.fx.Node, stateful: Collection[str]) -> list[str]:
    """Those of the `stateful` modules that the call of `node` runs: its target, or modules inside it."""
    if node.op != "call_module":
        return []
    return [path for path in stateful if node.target == WHOLE or is_inside(path, str(node.target))]


def cleanup(traced: Traced, model: nn.Module) -> None:
    """Change the graph of `traced` in place; what it computes stays the same."""
    graph = traced.module.graph
    kept = {node for node in traced.outputs if isinstance(node, torch.fx.Node)}
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in kept and _has_no_effect(node):
            graph.erase_node(node)
    _name_by_reader(traced.module, model)
    graph.lint()


def _has_no_effect(node: torch.fx.Node) -> bool:
    """Return whether `node` only computes its value: an attribute, or an operator that neither mutates nor draws."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    asserts = "assert" in str(node.target) or "sym_constrain" in str(node.target)
    return asserts or not (draws or node.target._schema.is_mutable)


def _name_by_reader(module: torch.fx.GraphModule, model: nn.Module) -> None:
    """Let each node read a tensor with several names (a tied weight) under the name closest to the node's module."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    readers = {str(node.target): node for node in module.graph.nodes if node.op == "get_attr"}
    for target, node in list(readers.items()):
        names_of_tensor = names[id(tensors[target])] if target in tensors else []
        for user in list(node.users) if len(names_of_tensor) > 1 else ():
            path = f"{(user.meta.get('call') or ('', None))[0]}."
            best = max(names_of_tensor, key=lambda name: (_common_prefix(name, path), name == target))
            if best not in readers:
                _assign_attr(tensors[best], module, best)
                with module.graph.inserting_before(node):
                    readers[best] = module.graph.get_attr(best)
            user.replace_input_with(node, readers[best])


def _common_prefix(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _mark_draws(module: torch.fx.GraphModule, runs: Sequence[Mapping[str, NodeRecord]]) -> None:
    """Set `draws` in the meta of the nodes of `module` that draw, in the order of the user's code.

    `runs` are the records of its nodes for several inputs. Raises ModelError for a call whose draws cannot be
    distinguished.
    """
    calls: Counter[str] = Counter()
    draws = 0
    for node in module.graph.nodes:
        records = [run[node.name] for run in runs if node.name in run]
        used = frozenset[str]().union(*(record.draws for record in records))
        if any(record.operators_that_draw for record in records):
            used |= {"torch"}  # though it may have drawn nothing for these inputs
        if node.op == "call_module":
            path = str(node.target)
            calls[path] += 1
            generators = used if is_from_torch(attribute(module, path)) else frozenset(GENERATORS)
            if generators:
                node.meta["draws"] = Draws((module_draw(path, calls[path]),), generators)
        elif used:
            count = _operators_that_draw(node, records)
            node.meta["draws"] = Draws(tuple(operator_draw(draws + i + 1) for i in range(count)), used)
            draws += count


def _operators_that_draw(node: torch.fx.Node, records: Sequence[NodeRecord]) -> int:
    counts = {record.operators_that_draw for record in records if record.operators_that_draw is not None}
    if len(counts) == 1 and 0 not in counts:
        return counts.pop()
    path = (node.meta.get("call") or ("", None))[0]
    where = f"in {path}" if path else "in the model's own forward"
    why = "is an operator without torch.Tag.nondeterministic_seeded" if 0 in counts else "varies with the inputs"
    raise ModelError(
        f"{node.target} {where} draws random numbers, and {why}; move it into a module of its own and name that among "
        "the blocks, or draw with torch's functions"
    )


Nodes = tuple[torch.fx.Node, torch.fx.Node]


def _functionalize(
    module: torch.fx.GraphModule, outputs: Sequence[Any], records: dict[str, NodeRecord]
) -> tuple[tuple[Any, ...], list[Nodes]]:
    """Give every node that reads a tensor after a write an edge from the node that wrote.

    The writing node replaces the tensor if it returns it (`x.add_(1)`); otherwise (`x[0] = 1`) an identity behind it
    does. Returns the new `outputs`, and pairs of nodes that no cut may separate, because memory is written under one
    name and read under another between them. Buffers of modules are left alone.
    """
    current = {node.name: node for node in module.graph.nodes}
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    inseparable: list[Nodes] = []
    for node in list(module.graph.nodes):
        changed = records.get(node.name)
        if changed is None or not changed.changes:
            continue
        written = dict.fromkeys(current[name] for name in changed.changes)
        records[node.name] = replace(changed, changes=tuple(item.name for item in written))
        tensors = [item for item in written if item.op != "get_attr"]
        given = {current[name] for name in changed.direct}
        returned = {current[name] for name in changed.returns}
        differentiable = {(current[name], i) for name, i in changed.differentiable}
        later = {old: [user for user in old.users if position[user] > position[node]] for old in tensors}
        read = [old for old in tensors if later[old] or old in outputs]
        involved = sorted({*read, *given.intersection(tensors)}, key=position.__getitem__)
        inseparable += [(old, node) for old in involved[1:]]
        for old in read:
            new = node if old in returned else _behind(node, old, module.graph, position)
            if new is not node:
                records[new.name] = _after_write(records[old.name], {i for item, i in differentiable if item is old})
            for user in later[old]:
                user.replace_input_with(old, new)
            outputs = [new if item is old else item for item in outputs]
            current = {name: new if item is old else item for name, item in current.items()}
    return tuple(outputs), inseparable


def _behind(
    node: torch.fx.Node,
    old: torch.fx.Node,
    graph: torch.fx.Graph,
    position: dict[torch.fx.Node, int],
) -> torch.fx.Node:
    """A new node behind `node` that replaces `old`."""
    with graph.inserting_after(node):
        new = graph.call_function(identity, (old,))
    new.meta = {key: item for key, item in node.meta.items() if key == "call"}
    position[new] = position[node]
    return new


def _after_write(record: NodeRecord, differentiable: Collection[int]) -> NodeRecord:
    """The record of a value after a write, which has made the leaves at these positions require a gradient."""
    leaves = [
        replace(leaf, requires_grad=leaf.requires_grad or i in differentiable)
        if isinstance(leaf, TensorFacts)
        else leaf
        for i, leaf in enumerate(record.leaves)
    ]
    return NodeRecord(record.tree, tuple(leaves))
