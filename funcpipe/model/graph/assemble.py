"""A traced graph becomes a LayerGraph: batch dimensions resolved, writes made explicit, nodes grouped into layers."""

from collections.abc import Collection, Mapping, Sequence

import torch.fx
from torch import Tensor

from funcpipe.model.graph.batch_dims import BatchDims, at_sample_size, resolve_batch_dims
from funcpipe.model.graph.crossings import crossings_of
from funcpipe.model.graph.functionalize import functionalize
from funcpipe.model.graph.layering import layers_of
from funcpipe.model.graph.observe import NodeRecord
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.replicated_values import mark_replicated
from funcpipe.model.graph.signature import batch_of
from funcpipe.model.graph.tracers import Traced, TraceRequest
from funcpipe.model.graph.values import LayerGraph


def assemble(
    request: TraceRequest,
    traced: Traced,
    runs: Sequence[dict[str, NodeRecord]],
    inputs: Mapping[str, Tensor],
    changed: Collection[str],
) -> LayerGraph:
    """The layers of a `traced` model and what passes between them, for a sample's `inputs`.

    `runs` are the records of its nodes for the two batch sizes of `request`; `changed` are the buffers that a forward
    pass changes.
    """
    model, module = request.model, traced.module
    sizes = [batch_of(example) or 1 for example in request.examples]
    batches = BatchDims(sizes[0], sizes[1], batch_of(inputs) or 1)
    records = {name: at_sample_size(runs[0][name], runs[1][name], batches) for name in runs[0]}
    outputs = resolve_batch_dims(module, traced.outputs, runs[0], runs[1], batches)
    records |= {name: item for name, item in runs[0].items() if name not in records}
    outputs, inseparable = functionalize(module, outputs, records)
    mark_replicated(module, records)
    inseparable += _same_buffer(module, changed)
    layers = layers_of(module, model, outputs, records, inseparable)
    crossings, values = crossings_of(layers, outputs, records)
    return LayerGraph(
        name=type(model).__name__,
        module=module,
        layers=layers,
        values=values,
        inputs=request.signature.tensors,
        batched=tuple(name for name, tensor in inputs.items() if tensor.shape[:1] == (batches.sample,)),
        signature=request.signature,
        crossings=crossings,
        outputs=outputs,
        output_tree=traced.output_tree,
        state=frozenset(model.state_dict()),
        training={name: part.training for name, part in model.named_modules()},
        notes=traced.notes,
    )


def _same_buffer(module: torch.fx.GraphModule, changed: Collection[str]) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """The first and the last node that change each buffer: a cut between them would leave two stages with half of its
    updates.
    """
    first: dict[str, torch.fx.Node] = {}
    last: dict[str, torch.fx.Node] = {}
    for node in module.graph.nodes:
        for name in _changes(node, module, changed):
            first.setdefault(name, node)
            last[name] = node
    return [(first[name], last[name]) for name in first if first[name] is not last[name]]


def _changes(node: torch.fx.Node, module: torch.fx.GraphModule, changed: Collection[str]) -> list[str]:
    if node.op == "call_module":
        names = (f"{node.target}.{name}" for name, _ in attribute(module, str(node.target)).named_buffers())
    else:
        names = (str(used.target) for used in node.all_input_nodes if used.op == "get_attr")
    return [name for name in names if name in changed]
