"""`trace`: an ordinary module and a sample of its inputs become a graph of layers."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.graph.agreement import Example, difference_of, disagreement, example
from funcpipe.graph.assemble import assemble
from funcpipe.graph.blame import blame, find_draw
from funcpipe.graph.export_route import trace_export
from funcpipe.graph.fx_route import trace_fx
from funcpipe.graph.quiet import nothing_saved, ready_to_train, untouched
from funcpipe.graph.record_route import trace_recorded
from funcpipe.graph.recorder import ForeignDraw
from funcpipe.graph.routes import Task, Traced
from funcpipe.graph.signature import Signature, batch_of, resized, signature_of
from funcpipe.graph.tidy import tidy
from funcpipe.graph.values import Attempt, LayerGraph


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
        task = Task(model, signature, (examples[0].inputs, examples[1].inputs), frozenset(blocks))
        traced, attempts = _traced(task, examples)
        return assemble(task, traced, attempts, inputs)


ROUTES: tuple[tuple[str, Callable[[Task], Traced]], ...] = (("fx", trace_fx), ("export", trace_export))


def _traced(task: Task, examples: list[Example]) -> tuple[Traced, tuple[Attempt, ...]]:
    """The graph by the first route that gives one that agrees with the model, and the attempts up to it."""
    attempts = []
    for name, route in ROUTES:
        traced, _, failure = _attempt(route, task, examples)
        attempts.append(Attempt(name, failure))
        if traced is not None:
            return traced, tuple(attempts)
    whole: list[str] = []
    while True:
        traced, culprit, failure = _attempt(trace_recorded, task, examples)
        if traced is not None:
            notes = (*traced.notes, *whole)
            return replace(traced, notes=notes), (*attempts, Attempt("blocks"))
        blocks = _alike(task, culprit)
        if not blocks - task.blocks:
            raise ModelError(_refusal(task, [*attempts, Attempt("blocks", failure)]))
        task = replace(task, blocks=task.blocks | blocks)
        whole.append(f"{', '.join(sorted(blocks))}: run as one block each, because of {failure}")


def _attempt(
    route: Callable[[Task], Traced], task: Task, examples: list[Example]
) -> tuple[Traced | None, str | None, str | None]:
    """What `route` gives; or, if it fails, the path of the module that is to blame, if known, and why."""
    try:
        with untouched(task.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracers warn of what the comparison below finds out
            traced = route(task)
        tidy(traced, task.model)
        failure = disagreement(traced, task.model, examples)
    except ForeignDraw as error:
        return None, error.path, f"{_draw(task, examples[0])[1]}: {error}"
    except Exception as error:  # noqa: BLE001 - a user's code and a tracer can raise anything; the next route is tried
        return None, *blame(task.model, error)
    if failure is None:
        return traced, None, None
    _, place = _draw(task, examples[0]) if "generator" in failure else (None, None)
    return None, None, f"{place}: {failure}" if place else failure


def _draw(task: Task, one: Example) -> tuple[str | None, str | None]:
    args, kwargs = task.signature.arguments({name: tensor.clone() for name, tensor in one.inputs.items()})
    with untouched(task.model), nothing_saved():
        return find_draw(task.model, lambda: task.model(*args, **kwargs))


def _alike(task: Task, path: str | None) -> frozenset[str]:
    """The module at `path` and all others of its class, which would fail alike; nothing if it is the whole model."""
    if not path:
        return frozenset()
    modules = dict(task.model.named_modules())
    return frozenset(name for name, module in modules.items() if name and type(module) is type(modules[path]))


def _refusal(task: Task, attempts: Sequence[Attempt]) -> str:
    tried = "\n".join(f"  {attempt.route}: {attempt.failure}" for attempt in attempts)
    return (
        f"{type(task.model).__name__} cannot be made a graph of layers. What was tried:\n{tried}\n"
        "A way out: put the code of that line into a submodule, which is then run as one block, or make it independent "
        "of what tensors hold"
    )


def _examples(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor]) -> list[Example]:
    """The model's own results for two batch sizes, as small as it takes, and for a batch of one if it takes that."""
    batch = batch_of(inputs) or 1
    failure: Exception | None = None
    for few, many in ((2, 3), (2, 4), (batch, 2 * batch), (batch, batch)):
        try:
            found = [_example(model, signature, inputs, size, seed) for seed, size in enumerate((few, many))]
            break
        except Exception as error:  # noqa: BLE001 - a model may refuse a batch size; the sample's own it must take
            failure = error
    else:
        assert failure is not None
        raise ModelError(f"the model fails on the sample. {blame(model, failure)[1]}") from failure
    with contextlib.suppress(Exception):
        found.append(_example(model, signature, inputs, 1, 2))
    again = _example(model, signature, inputs, batch_of(found[0].inputs) or 1, 0)
    difference = difference_of(again.outcome, found[0].outcome)
    if difference is not None:
        raise ModelError(
            f"{type(model).__name__} gives other results for the same inputs and seeds ({difference}): it draws from "
            "a random number generator of its own, or changes with each call; use torch's generator instead"
        )
    return found


def _example(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], batch: int, seed: int) -> Example:
    return example(model, signature, resized(inputs, batch, offset=seed), seed)
