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
from funcpipe.model.graph.eager_route import trace_eagerly
from funcpipe.model.graph.eager_tracer import ForeignDraw
from funcpipe.model.graph.equivalence import Example, compare, difference_of, example
from funcpipe.model.graph.export_route import trace_export
from funcpipe.model.graph.fx_route import trace_fx
from funcpipe.model.graph.isolation import nothing_saved, ready_to_train, untouched
from funcpipe.model.graph.observe import Seen
from funcpipe.model.graph.signature import Signature, batch_of, resized, signature_of
from funcpipe.model.graph.source_location import find_draw, source_location
from funcpipe.model.graph.tracers import Traced, TraceTask
from funcpipe.model.graph.values import Attempt, LayerGraph


def trace(
    model: nn.Module,
    sample: tuple[Any, ...],
    sample_kwargs: Mapping[str, Any] = {},
    *,
    blocks: Sequence[str] = (),
) -> LayerGraph:
    """The layers of `model`, as it runs in training on inputs like `sample` and `sample_kwargs`.

    The batch size of later inputs may differ from the sample's. `blocks` are paths of modules that are not to be
    looked into: each is one layer. The model is not changed; the graph holds its parameters by reference. Raises
    ModelError, naming the module, the line and a way out, where the model cannot be taken.
    """
    signature = signature_of(model, sample, sample_kwargs)
    inputs = signature.bind(sample, sample_kwargs)
    modules = dict(model.named_modules())
    for path in blocks:
        if path not in modules:
            raise ModelError(f"{type(model).__name__} has no module {path!r} that could be made one block")
    with ready_to_train(model):
        examples = _examples(model, signature, inputs)
        task = TraceTask(model, signature, (examples[0].inputs, examples[1].inputs), frozenset(blocks))
        found, attempts = _traced(task, examples)
        changed = set(examples[0].outcome.buffers)
        statistics = statistics_of(model, changed)
        graph = assemble(found.task, found.traced, found.runs, inputs, changed)
        return replace(graph, statistics=statistics, attempts=attempts, notes=(*graph.notes, *found.notes))


@dataclass(frozen=True)
class _Found:
    """A graph that agrees with the model: for which task it was made, what was seen of its nodes, what to tell."""

    task: TraceTask
    traced: Traced
    runs: list[dict[str, Seen]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Failed:
    """Why a route failed, and the path of the module that is to source_location if that is known."""

    reason: str
    path: str | None = None


ROUTES: tuple[tuple[str, Callable[[TraceTask], Traced]], ...] = (("fx", trace_fx), ("export", trace_export))


def _traced(task: TraceTask, examples: list[Example]) -> tuple[_Found, tuple[Attempt, ...]]:
    """The graph by the first route that gives one that agrees with the model, and the attempts up to it."""
    attempts: list[Attempt] = []
    for name, route in ROUTES:
        result = _attempt(route, task, examples)
        if isinstance(result, _Found):
            return result, (*attempts, Attempt(name))
        attempts.append(Attempt(name, result.reason))
    notes: list[str] = []
    while True:
        result = _attempt(trace_eagerly, task, examples)
        if isinstance(result, _Found):
            return replace(result, notes=tuple(notes)), (*attempts, Attempt("blocks"))
        blocks = _alike(task, result.path) - task.blocks
        if not blocks:
            raise ModelError(_refusal(task, [*attempts, Attempt("blocks", result.reason)], examples[0]))
        task = replace(task, blocks=task.blocks | blocks)
        notes.append(f"left whole, each as one block: {', '.join(sorted(blocks))}; the reason is {result.reason}")


def _attempt(route: Callable[[TraceTask], Traced], task: TraceTask, examples: list[Example]) -> _Found | _Failed:
    try:
        with untouched(task.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracers warn of what the comparison below finds out
            traced = route(task)
        cleanup(traced, task.model)
        runs, difference = compare(traced, task.model, examples)
    except ForeignDraw as error:
        return _Failed(f"{_draw(task, examples[0])}: {error}", error.path)
    except Exception as error:  # noqa: BLE001 - a user's code and a tracer can raise anything; the next route is tried
        path, reason = source_location(task.model, error)
        return _Failed(reason, path)
    if difference is None:
        return _Found(task, traced, runs)
    place = _draw(task, examples[0]) if "generator" in difference else None
    return _Failed(f"{place}: {difference}" if place else difference)


def _draw(task: TraceTask, one: Example) -> str | None:
    """The line that draws random numbers from a generator that is not torch's, if there is one."""
    args, kwargs = task.signature.arguments({name: tensor.clone() for name, tensor in one.inputs.items()})
    with untouched(task.model), nothing_saved():
        return find_draw(task.model, lambda: task.model(*args, **kwargs))[1]


def _alike(task: TraceTask, path: str | None) -> frozenset[str]:
    """The module at `path` and all others of its class, which would fail alike; nothing if it is the whole model."""
    if not path:
        return frozenset()
    modules = dict(task.model.named_modules())
    return frozenset(name for name, module in modules.items() if name and type(module) is type(modules[path]))


def _refusal(task: TraceTask, attempts: Sequence[Attempt], one: Example) -> str:
    title = type(task.model).__name__
    again = example(task.model, task.signature, one.inputs, seed=one.seed, backward=True)
    difference = difference_of(again.outcome, one.outcome)
    if difference is not None:
        return (
            f"{title} gives other results for the same inputs and seeds ({difference}): it draws from a random number "
            "generator of its own, or changes with each call; use torch's generator instead"
        )
    tried = "\n".join(f"  {attempt.route}: {attempt.failure}" for attempt in attempts)
    return (
        f"{title} cannot be made a graph of layers. What was tried:\n{tried}\nA way out: put the code of that line "
        "into a submodule, which is then run as one block, or make it independent of what tensors hold"
    )


def _examples(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor]) -> list[Example]:
    """The model's own results for two batch sizes, as small as it takes, and for a batch of one if it takes that."""
    batch = batch_of(inputs) or 1
    failure: Exception | None = None
    for sizes in ((2, 3), (2, 4), (batch, 2 * batch), (batch, batch)):
        try:
            found = [_example(model, signature, inputs, size, seed) for seed, size in enumerate(sizes)]
            break
        except Exception as error:  # noqa: BLE001 - a model may refuse a batch size; the sample's own it must take
            failure = error
    else:
        assert failure is not None
        raise ModelError(f"the model fails on the sample. {source_location(model, failure)[1]}") from failure
    with contextlib.suppress(Exception):  # such as BatchNorm raises
        found.append(_example(model, signature, inputs, 1, 2))
    return found


def _example(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], batch: int, seed: int) -> Example:
    return example(model, signature, resized(inputs, batch, offset=seed), seed=seed, backward=seed == 0)
