"""Compare a graph with its model for the batch sizes that a training will really use."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph.autocast import autocast_to
from funcpipe.model.graph.equivalence import Example, example, observation
from funcpipe.model.graph.input_batches import Collated, CollatedBatches, CutBatches, InputBatches
from funcpipe.model.graph.isolation import forward_only, preserve_state
from funcpipe.model.graph.modes import evaluation_mode, training_mode
from funcpipe.model.graph.observations import difference_of
from funcpipe.model.graph.program import Ref, compile_nodes, plain, resolve, run
from funcpipe.model.graph.tracers import flatten_output
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.graph.values import LayerGraph


def check_batch_sizes(
    graph: LayerGraph,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    sizes: Iterable[int],
    *,
    training: bool = True,
    collated: Collated | None = None,
) -> None:
    """Raise ModelError or DataError unless `graph` computes what `model` does for batches of each of `sizes`.

    The graph is that of the model in training, or else in eval mode. The batches are cut from `inputs`, or repeat them;
    where their first dimension is not the batch, they are `collated`, and differ in more than their size. What code
    makes of a batch size is not always seen by tracing.
    """
    if collated is None:
        for size in sorted(set(sizes) - graph.compared):
            _check(graph, model, CutBatches(inputs), size, 0, training=training)
        return
    batches = CollatedBatches(graph.signature, collated)
    for size in sorted(set(sizes)):
        for offset in _OFFSETS:
            _check(graph, model, batches, size, offset, training=training)


_OFFSETS = (1, 6)
"""Where collated batches begin among the samples at hand."""


def _check(
    graph: LayerGraph, model: nn.Module, batches: InputBatches, size: int, offset: int, *, training: bool
) -> None:
    assert graph.signature.checks is not None
    try:
        given = batches.batch(size, offset)
        graph.signature.checks.check(given)
    except DataError as error:
        cut = isinstance(batches, CutBatches) or size != batches.samples
        way_out = "; choose a global batch and micro-batches that divide the number of samples" if cut else ""
        raise DataError(
            f"the run would have micro-batches of {size}, for which the layers of {graph.name} are not right{way_out}. "
            f"{error}"
        ) from error
    with training_mode(model) if training else evaluation_mode(model), autocast_to(graph.precision, cached=False):
        try:
            plainly = _example(model, graph, given, size)
        except Exception as error:
            reason = source_location(model, error)[1]
            raise DataError(
                f"the model fails on micro-batches of {size}, which the run would have: {reason}. Choose a global "
                "batch and micro-batches that divide the number of samples"
            ) from error
        saves_tensors = plainly.saves_tensors
        found = observation(model, lambda tensors: _outputs(graph, tensors), given, size, saves_tensors=saves_tensors)
    difference = difference_of(found, plainly.result)
    if difference is not None:
        raise ModelError(
            f"{graph.name} was traced with batches of {_listed(graph.compared)}, but it does something else for "
            f"batches of {size}, which the run would have: {difference.text}. Choose micro-batches of those sizes, or "
            "move the code that depends on the batch size into a module of its own and trace that as one block"
        )


def run_layers(graph: LayerGraph, model: nn.Module, inputs: Mapping[str, Tensor], *, training: bool) -> None:
    """Run the forward of `graph`, which `model` was traced to, on `inputs`; raises what its code raises."""
    mode = training_mode(model) if training else evaluation_mode(model)
    with mode, preserve_state(model), forward_only(saves_tensors=False), autocast_to(graph.precision, cached=False):
        _outputs(graph, {name: tensor.clone() for name, tensor in inputs.items()})


def _example(model: nn.Module, graph: LayerGraph, inputs: Mapping[str, Tensor], seed: int) -> Example:
    try:
        return example(model, graph.signature, inputs, seed=seed, backward=False)
    except Exception:  # noqa: BLE001 - gradients inside a forward pass fail in many ways without what autograd saves
        return example(model, graph.signature, inputs, seed=seed, backward=False, saves_tensors=True)


def _outputs(graph: LayerGraph, tensors: Mapping[str, Tensor]) -> list[Any]:
    """The leaves of the model's output for input `tensors`, by the graph as a whole."""
    env: dict[str, Any] = {}
    for node in graph.module.graph.nodes:
        if "input" in node.meta:
            env[node.name] = tensors[node.meta["input"]]
        elif "symbol" in node.meta:
            env[node.name] = tensors[node.meta["symbol"].source].size(node.meta["symbol"].dim)
    nodes = [node for node in graph.module.graph.nodes if node.op not in ("placeholder", "output")]
    outputs = plain(graph.outputs)
    kept = {leaf.name for leaf in outputs if isinstance(leaf, Ref)} | env.keys()
    run(compile_nodes(nodes, kept), env, graph.module)
    return flatten_output(graph.output_tree.unflatten(iter(resolve(list(outputs), env))))[0]


def _listed(sizes: Iterable[int]) -> str:
    *most, last = map(str, sorted(sizes))
    return f"{', '.join(most)} and {last}" if most else last
