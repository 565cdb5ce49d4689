"""`trace`: an ordinary module and a sample of its inputs become a graph of layers."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.assemble import assemble
from funcpipe.model.graph.batchnorm import statistics_of
from funcpipe.model.graph.cleanup import cleanup
from funcpipe.model.graph.eager_graph import trace_eager
from funcpipe.model.graph.eager_tracer import NonTorchRandomness
from funcpipe.model.graph.equivalence import Example, compare, difference_of, example
from funcpipe.model.graph.export_tracer import trace_export
from funcpipe.model.graph.fx_tracer import trace_fx
from funcpipe.model.graph.isolation import preserve_state, training_mode, without_saved_tensors
from funcpipe.model.graph.observe import NodeRecord
from funcpipe.model.graph.signature import Signature, batch_of, resized, signature_of
from funcpipe.model.graph.source_location import find_random_draw, source_location
from funcpipe.model.graph.tracers import Traced, TraceRequest
from funcpipe.model.graph.values import Attempt, LayerGraph


def trace(
    model: nn.Module,
    sample: tuple[Any, ...],
    sample_kwargs: Mapping[str, Any] = {},
    *,
    blocks: Sequence[str] = (),
) -> LayerGraph:
    """The layers of `model`, as it runs in training on inputs like `sample` and `sample_kwargs`.

    Later inputs may have another batch size. `blocks` are paths of modules that become one layer each, whatever is
    inside. The model is not changed; the graph holds its parameters by reference. Raises ModelError if the model cannot
    be traced, which names the module, the line and a way out.
    """
    signature = signature_of(model, sample, sample_kwargs)
    inputs = signature.bind(sample, sample_kwargs)
    modules = dict(model.named_modules())
    for path in blocks:
        if path not in modules:
            raise ModelError(f"{type(model).__name__} has no module {path!r} to make a block of")
    with training_mode(model):
        examples = _examples(model, signature, inputs)
        request = TraceRequest(model, signature, (examples[0].inputs, examples[1].inputs), frozenset(blocks))
        found, attempts = _traced(request, examples)
        changed = set(examples[0].result.buffers)
        statistics = statistics_of(model, changed)
        graph = assemble(found.request, found.traced, found.runs, inputs, changed)
        return replace(graph, statistics=statistics, attempts=attempts, notes=(*graph.notes, *found.notes))


@dataclass(frozen=True)
class _Found:
    """A graph that agrees with the model: the request it was made for, the records of its nodes, notes for the user."""

    request: TraceRequest
    traced: Traced
    runs: list[dict[str, NodeRecord]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Failed:
    """Why a tracer failed, and the path of the module to blame if that is known."""

    reason: str
    path: str | None = None


TRACERS: tuple[tuple[str, Callable[[TraceRequest], Traced]], ...] = (("fx", trace_fx), ("export", trace_export))


def _traced(request: TraceRequest, examples: list[Example]) -> tuple[_Found, tuple[Attempt, ...]]:
    """The graph of the first tracer whose graph agrees with the model, and the attempts up to it."""
    attempts: list[Attempt] = []
    for name, tracer in TRACERS:
        result = _attempt(tracer, request, examples)
        if isinstance(result, _Found):
            return result, (*attempts, Attempt(name))
        attempts.append(Attempt(name, result.reason))
    notes: list[str] = []
    while True:
        result = _attempt(trace_eager, request, examples)
        if isinstance(result, _Found):
            return replace(result, notes=tuple(notes)), (*attempts, Attempt("eager"))
        blocks = _same_class(request, result.path) - request.blocks
        if not blocks:
            raise ModelError(_refusal(request, [*attempts, Attempt("eager", result.reason)], examples[0]))
        request = replace(request, blocks=request.blocks | blocks)
        notes.append(f"kept as one block each: {', '.join(sorted(blocks))}, because of {result.reason}")


def _attempt(
    tracer: Callable[[TraceRequest], Traced], request: TraceRequest, examples: list[Example]
) -> _Found | _Failed:
    try:
        with preserve_state(request.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracers warn about what the comparison below checks
            traced = tracer(request)
        cleanup(traced, request.model)
        runs, difference = compare(traced, request.model, examples)
    except NonTorchRandomness as error:
        return _Failed(f"{_draw(request, examples[0])}: {error}", error.path)
    except Exception as error:  # noqa: BLE001 - a user's code and a tracer can raise anything; the next tracer is tried
        path, reason = source_location(request.model, error)
        return _Failed(reason, path)
    if difference is None:
        return _Found(request, traced, runs)
    place = _draw(request, examples[0]) if "generator" in difference else None
    return _Failed(f"{place}: {difference}" if place else difference)


def _draw(request: TraceRequest, one: Example) -> str | None:
    """The line that draws random numbers without torch, if there is one."""
    args, kwargs = request.signature.arguments({name: tensor.clone() for name, tensor in one.inputs.items()})
    with preserve_state(request.model), without_saved_tensors():
        return find_random_draw(request.model, lambda: request.model(*args, **kwargs))[1]


def _same_class(request: TraceRequest, path: str | None) -> frozenset[str]:
    """The module at `path` and all others of its class, which would fail too; empty if it is the model itself."""
    if not path:
        return frozenset()
    modules = dict(request.model.named_modules())
    return frozenset(name for name, module in modules.items() if name and type(module) is type(modules[path]))


def _refusal(request: TraceRequest, attempts: Sequence[Attempt], one: Example) -> str:
    title = type(request.model).__name__
    again = example(request.model, request.signature, one.inputs, seed=one.seed, backward=True)
    difference = difference_of(again.result, one.result)
    if difference is not None:
        return (
            f"{title} gives different results for the same inputs and seeds ({difference}): it has a random number "
            "generator of its own, or changes with each call; use torch's global generator instead"
        )
    tried = "\n".join(f"  {attempt.tracer}: {attempt.failure}" for attempt in attempts)
    return (
        f"{title} cannot be traced into a graph of layers. What was tried:\n{tried}\nMove the code of that line into a "
        "submodule, which then runs as one block, or make it independent of the contents of tensors"
    )


def _examples(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor]) -> list[Example]:
    """The model's own results for the two smallest batch sizes that it accepts, and for a batch of one."""
    batch = batch_of(inputs) or 1
    failure: Exception | None = None
    for sizes in ((2, 3), (2, 4), (batch, 2 * batch), (batch, batch)):
        try:
            found = [_example(model, signature, inputs, size, seed) for seed, size in enumerate(sizes)]
            break
        except Exception as error:  # noqa: BLE001 - a model may refuse some batch sizes, but not the sample's
            failure = error
    else:
        assert failure is not None
        raise ModelError(f"the model fails on the sample. {source_location(model, failure)[1]}") from failure
    with contextlib.suppress(Exception):  # such as BatchNorm raises
        found.append(_example(model, signature, inputs, 1, 2))
    return found


def _example(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], batch: int, seed: int) -> Example:
    return example(model, signature, resized(inputs, batch, offset=seed), seed=seed, backward=seed == 0)
