"""Check that a graph computes what its model does: both run, on other inputs and seeds than those of the tracing.

`compare` does so while a model is traced; `check_batch_sizes` for the batch sizes that a training will really use.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.errors import DataError, ModelError
from funcpipe.model.draws import GENERATORS, draws_by_data, generator_states, reseed
from funcpipe.model.graph.inputs import Collated, CollatedBatches, CutBatches, InputBatches, Signature, batch_of, holds
from funcpipe.model.graph.isolation import forward_only, preserve_gradients, preserve_state
from funcpipe.model.graph.modes import evaluation_mode, training_mode
from funcpipe.model.graph.observations import Difference, NodeRecord, Observation, difference_of, observe
from funcpipe.model.graph.program import Ref, autocast_to, compile_nodes, plain, resolve, run
from funcpipe.model.graph.python_state import read_state
from funcpipe.model.graph.tracers import Traced, flatten_output
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.graph.values import LayerGraph
from funcpipe.model.tensors import fingerprint, same


@dataclass(frozen=True)
class Example:
    """Inputs by name, a seed, and the result of the model itself for them; `saves_tensors` as in TraceRequest. `before`
    are the inputs of a forward that ran before it, whose state it began with. There are so many `samples` in it.
    """

    inputs: Mapping[str, Tensor]
    seed: int
    result: Observation
    saves_tensors: bool = False
    before: Mapping[str, Tensor] | None = None
    samples: int = 1


def example(
    model: nn.Module,
    signature: Signature,
    inputs: Mapping[str, Tensor],
    *,
    seed: int,
    backward: bool,
    saves_tensors: bool = False,
    before: Mapping[str, Tensor] | None = None,
    keep_buffers: bool = True,
    samples: int | None = None,
) -> Example:
    """Run the model itself on `inputs`, of so many `samples`: forward and, if `backward`, backward.

    Without `samples`, that is the size of their first dimension. With `before` it runs on those inputs first, in the
    same way, and goes on with the state that this leaves; unless `keep_buffers`, with the buffers as they were.
    """

    def forward(given: dict[str, Tensor]) -> list[Any]:
        args, kwargs = signature.arguments(given)
        return flatten_output(model(*args, **kwargs))[0]

    ways = {"backward": backward, "saves_tensors": saves_tensors, "keep_buffers": keep_buffers}
    found = _observation(model, forward, inputs, seed, before=before, reads_state=True, **ways)
    return Example(inputs, seed, found, saves_tensors, before, samples or batch_of(inputs) or 1)


def compare(
    traced: Traced, model: nn.Module, examples: Sequence[Example]
) -> tuple[list[dict[str, NodeRecord] | None], Difference | None]:
    """Run the graph on `examples`: the records of its nodes for each, and how it differs from the model, if it does.

    The graph may refuse all but the first two, which it was made from; there is no record of those.
    """
    names = {node.meta["input"]: node.name for node in traced.module.graph.nodes if node.op == "placeholder"}
    runs: list[dict[str, NodeRecord] | None] = []
    by_data = {node.name for node in traced.module.graph.nodes if draws_by_data(node.target)}

    def forward(given: dict[str, Tensor]) -> list[Any]:
        drawing = by_data.union(*([n for n, record in run.items() if record.draws] for run in runs if run is not None))
        placed = {names[name]: t for name, t in given.items()}
        records, leaves = observe(traced.module, placed, traced.outputs, drawing)
        runs.append(records)
        return flatten_output(traced.output_tree.unflatten(iter(leaves)))[0]

    for i, one in enumerate(examples):
        try:
            backward = one.result.gradients is not None
            ways = {"backward": backward, "saves_tensors": one.saves_tensors}
            found = _observation(model, forward, one.inputs, one.seed, before=one.before, **ways)
        except DataError:
            if i < 2:
                raise
            runs.append(None)
            continue
        difference = difference_of(found, one.result)
        if difference is not None and i >= 2 and _refuses(traced, one.inputs, runs):
            runs[i] = None
        elif difference is not None:
            return runs, replace(difference, text=f"{difference.text}, for a batch of {one.samples}")
    return runs, None


def _refuses(traced: Traced, inputs: Mapping[str, Tensor], runs: Sequence[Mapping[str, NodeRecord] | None]) -> bool:
    """Return whether something that the graph takes for granted does not hold for `inputs`, those of the last run."""
    sizes = {name: tensor.shape for name, tensor in inputs.items()}
    if not all(holds(guard, sizes) for guard in traced.guards):
        return True
    one, two, last = runs[0], runs[1], runs[-1]
    assert one is not None and two is not None and last is not None  # noqa: PT018 - for mypy
    asked = [node.name for node in traced.module.graph.nodes if "asked" in node.meta]
    return any(_constants_change(one[name].leaves, two[name].leaves, last[name].leaves) for name in asked)


def _constants_change(one: Sequence[Any], two: Sequence[Any], last: Sequence[Any]) -> bool:
    """Return whether what was the same in two runs is not in the last."""
    if len(one) != len(last):
        return True
    return any(a == b and a != c for a, b, c in zip(one, two, last, strict=True))


def _observation(
    model: nn.Module,
    forward: Callable[[dict[str, Tensor]], list[Any]],
    inputs: Mapping[str, Tensor],
    seed: int,
    *,
    backward: bool = False,
    saves_tensors: bool = False,
    before: Mapping[str, Tensor] | None = None,
    keep_buffers: bool = True,
    reads_state: bool = False,
) -> Observation:
    """Run `forward`, which computes what `model` does, on a copy of `inputs`, in the way that `example` describes.

    It leaves no trace in the model. The model's attributes are read if `reads_state`.
    """

    def once(given: Mapping[str, Tensor], seed: int) -> Observation:
        return _forward_and_backward(model, forward, given, seed, backward=backward, reads_state=reads_state)

    with preserve_state(model), preserve_gradients(model), forward_only(saves_tensors or backward):
        if before is not None:
            old = _buffers(model)
            once(before, seed + 1)
            if not keep_buffers:
                _write_buffers(model, old)
        return once(inputs, seed)


def _forward_and_backward(
    model: nn.Module,
    forward: Callable[[dict[str, Tensor]], list[Any]],
    inputs: Mapping[str, Tensor],
    seed: int,
    *,
    backward: bool,
    reads_state: bool,
) -> Observation:
    old = _buffers(model)
    versions = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
    reseed(seed, GENERATORS)
    leaves = forward({name: tensor.clone() for name, tensor in inputs.items()})
    generators = generator_states()
    buffers = {name: new.clone() for name, new in model.named_buffers() if not same(old.get(name), new)}
    written = {n for n, buffer in model.named_buffers() if versions.get(n) != (id(buffer), buffer._version)}
    states = [read_state(model)] if reads_state else []
    gradients = _digests(model, leaves) if backward else None
    if reads_state and backward:
        states.append(read_state(model))
    forward_left = {**old, **buffers}
    late = {n: new.clone() for n, new in model.named_buffers() if backward and not same(forward_left.get(n), new)}
    kept = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Observation(kept, generators, buffers, gradients, frozenset(written & versions.keys()), tuple(states), late)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _write_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values and not same(values[name], buffer):
                buffer.copy_(values[name])


def _digests(model: nn.Module, leaves: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Run backward from `leaves`; return the sum and the absolute sum of each parameter's gradient."""
    digests: dict[str, tuple[float, float]] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and (own := fingerprint(gradient)) is not None:
                digests[name] = (float(int(own[:12], 16)), 0.0)
            elif gradient is not None:
                digests[name] = (float(gradient.double().sum()), float(gradient.double().abs().sum()))
            parameter.grad = None

        return take

    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    handles: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(hook(name)))  # type: ignore[no-untyped-call]
    try:
        if roots:
            torch.autograd.backward(roots, [_output_gradients(root) for root in roots])
    finally:
        for handle in handles:
            handle.remove()
    return digests


def _output_gradients(root: Tensor) -> Tensor:
    """Output gradients that are all different, so that no sum hides an error; without contents if `root` has none."""
    if fingerprint(root) is not None:
        return torch.ones_like(root)
    return torch.cos(torch.arange(root.numel(), dtype=torch.float32)).to(root.dtype).view(root.shape)


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
"""The samples at hand with which collated batches begin."""


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
    mode = (training_mode if training else evaluation_mode)(model, shortcuts=graph.shortcuts)
    with mode, autocast_to(graph.precision, cached=False):
        try:
            plainly = _example(model, graph, given, size)
        except Exception as error:
            reason = source_location(model, error)[1]
            raise DataError(
                f"the model fails on micro-batches of {size}, which the run would have: {reason}. Choose a global "
                "batch and micro-batches that divide the number of samples"
            ) from error
        saves_tensors = plainly.saves_tensors
        found = _observation(model, lambda tensors: _outputs(graph, tensors), given, size, saves_tensors=saves_tensors)
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
