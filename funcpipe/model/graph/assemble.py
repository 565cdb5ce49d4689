"""A traced graph becomes a LayerGraph: sizes resolved, writes made explicit, nodes grouped into layers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.fx
from torch import Tensor

from funcpipe.model.graph.crossings import crossings_of
from funcpipe.model.graph.functionalize import functionalize
from funcpipe.model.graph.input_checks import InputChecks
from funcpipe.model.graph.layering import layers_of
from funcpipe.model.graph.mark_draws import mark_draws
from funcpipe.model.graph.observe import NodeRecord, TensorFacts
from funcpipe.model.graph.program import WHOLE, attribute, is_inside
from funcpipe.model.graph.replicated_values import mark_replicated
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
    mark_draws(module, runs)
    records = {name: symbols.at_sample([run[name] for run in runs]) for name in runs[0]}
    outputs, sizes = resolve_sizes(module, traced.outputs, runs, symbols, records)
    outputs, inseparable = functionalize(module, outputs, records)
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
    """What the graph takes for granted about its inputs: what `sizes` says, and what the tracer has."""
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
