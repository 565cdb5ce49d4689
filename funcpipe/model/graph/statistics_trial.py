"""Try what a model does with its running statistics: whether replicas can add them up.

That is so if they are updated by r <- (1 - momentum) r + momentum x in each call, or are plain averages over all calls,
and neither x nor any result depends on r. So the model runs once more from other statistics, and must give the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from funcpipe.model.draws import GENERATORS, reseed
from funcpipe.model.graph.equivalence import Example, example
from funcpipe.model.graph.isolation import Snapshot, forward_only, preserve_state
from funcpipe.model.graph.observations import Observation, difference_of
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.user_code import first_difference, source_location, with_code
from funcpipe.model.graph.values import Statistic

_TOLERANCE = 1e-4
"""The largest difference between statistics that counts as rounding, relative to the largest that went into them."""

_MORE_CALLS = 1_000_000, 3
"""How many more calls the other statistics count: enough for any warm-up; few if they weigh the statistics."""


@dataclass(frozen=True)
class _Run:
    """The buffers before a run, after its forward and after its backward."""

    before: Mapping[str, Tensor]
    result: Observation

    def after(self, name: str) -> Tensor:
        return self.result.buffers.get(name, self.before[name])

    def late(self, name: str) -> Tensor:
        return self.result.late.get(name, self.after(name))

    def rise(self, name: str | None) -> float:
        return 0.0 if name is None else float(self.after(name)) - float(self.before[name])


class StatisticsTrial:
    """Runs of a model from its own statistics and from others, for the same inputs and seeds.

    `norms` are all that hold statistics which one of the `examples` has changed; the first of these has a backward.
    """

    def __init__(
        self, model: nn.Module, signature: Signature, examples: Sequence[Example], norms: Sequence[Statistic]
    ) -> None:
        self._model = model
        self._signature = signature
        self._example = examples[0]
        self._own = {name: attribute(model, name).detach().clone() for norm in norms for name in norm.buffers}
        self._moved = _moved(norms, self._own)
        self._runs = [_Run(self._own, one.result) for one in examples]

    def reader(self) -> str:
        """What depends on the statistics that a forward begins with, besides themselves; empty if nothing does."""
        try:
            moved = self._run(self._moved).result
        except Exception as error:  # noqa: BLE001 - code that reads statistics may refuse these ones
            return f"running statistics, which are read in {source_location(self._model, error)[1]}"
        self._runs.append(_Run(self._moved, moved))
        difference = difference_of(_without(moved, self._own), _without(self._example.result, self._own))
        if difference is None:
            return ""
        where = self._first_reader()
        return f"running statistics, which are read in {with_code(where) if where else 'the backward pass'}"

    def _first_reader(self) -> str | None:
        """The first line whose results depend on the statistics."""
        values = iter((self._own, self._moved))
        snapshot = Snapshot(self._model)
        args, kwargs = self._signature.arguments({name: t.clone() for name, t in self._example.inputs.items()})

        def prepare() -> None:
            snapshot.restore()
            _write(self._model, next(values))
            reseed(self._example.seed, GENERATORS)

        with preserve_state(self._model), forward_only(saves_tensors=True):
            buffers = [attribute(self._model, name) for name in self._own]
            return first_difference(lambda: self._model(*args, **kwargs), prepare, buffers)

    def statistic(self, norm: Statistic) -> Statistic | None:
        """`norm` with its calls in a forward, if its rule is as simple as that; call `reader` first.

        The count has risen by as many calls in all runs. Without a count, how much is left of a statistic tells.
        """
        base, moved = self._runs[0], self._runs[-1]
        rises = {run.rise(norm.count) for run in self._runs}
        if len(rises) > 1:
            return None
        rise = int(rises.pop())
        if rise:
            counted = replace(norm, calls=rise)
        else:  # InstanceNorm counts no calls, and takes None for 0
            uncounted = replace(norm, count=None, momentum=norm.momentum or 0.0)
            counted = replace(uncounted, calls=_calls(uncounted, base, moved))
        if counted.calls < 1:
            return None
        for name in norm.names:
            scale = max(float(t.abs().max()) for run in (base, moved) for t in (run.before[name], run.after(name)))
            one, other = (_added(counted, run.before, name, run.after(name)) for run in (base, moved))
            if not _agree(one, other, scale * _weight(counted, moved.before)):
                return None
        return self._with_backward(counted, base)

    def _with_backward(self, norm: Statistic, run: _Run) -> Statistic | None:
        """`norm`, with `again` if the backward of `run` has made the calls of its forward once more."""
        if run.result.late.keys().isdisjoint(norm.buffers):
            return norm
        if norm.count is not None and float(run.late(norm.count)) != float(run.after(norm.count)) + norm.calls:
            return None
        after = {name: run.after(name) for name in norm.buffers}
        for name in norm.names:
            one, other = _added(norm, run.before, name, run.after(name)), _added(norm, after, name, run.late(name))
            scale = max(float(t.abs().max()) for t in (run.before[name], run.after(name), run.late(name)))
            if not _agree(one, other, scale * _weight(norm, after)):
                return None
        return replace(norm, again=True)

    def _run(self, values: Mapping[str, Tensor]) -> Example:
        """The first example once more, from the statistics `values`."""
        one = self._example
        with preserve_state(self._model):
            _write(self._model, values)
            return example(
                *(self._model, self._signature, one.inputs),
                seed=one.seed,
                backward=one.result.gradients is not None,
                saves_tensors=one.saves_tensors,
            )


def _write(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        attribute(model, name).data.copy_(value)


def _moved(norms: Sequence[Statistic], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other statistics, far from the model's `own`, each element by another distance; variances stay positive."""
    generator, moved = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for norm in norms:
        for name in norm.names:
            distances = 10 + 10 * torch.rand(own[name].shape, generator=generator)
            moved[name] = own[name] + ((1 + own[name].abs()) * distances).to(own[name].dtype)
        if norm.count is not None:
            moved[norm.count] = own[norm.count] + _MORE_CALLS[norm.momentum is None]
    return moved


def _without(result: Observation, names: Mapping[str, Tensor]) -> Observation:
    """`result` but for these buffers."""
    return replace(result, buffers={name: tensor for name, tensor in result.buffers.items() if name not in names})


def _calls(norm: Statistic, base: _Run, moved: _Run) -> int:
    """How many calls have left as much of a statistic as one forward does; 0 if there is no such number."""
    assert norm.momentum is not None, "an average over all calls needs their number"
    if norm.momentum in (0, 1):
        return 1
    name = norm.names[0]
    left = (moved.after(name) - base.after(name)).double() / (moved.before[name] - base.before[name]).double()
    share = float(left.mean())
    return round(math.log(share) / math.log(1 - norm.momentum)) if 0 < share < 1 else 0


def _added(norm: Statistic, before: Mapping[str, Tensor], name: str, after: Tensor) -> Tensor:
    """What the calls of one forward have added to a statistic; to the sum over all calls, if it is their average."""
    if norm.momentum is not None:
        return after - (1 - norm.momentum) ** norm.calls * before[name]
    weight = _weight(norm, before)
    return after * weight - before[name] * (weight - norm.calls)


def _weight(norm: Statistic, before: Mapping[str, Tensor]) -> float:
    """By how many calls a statistic is to be multiplied after a forward, to be compared with others."""
    return 1.0 if norm.momentum is not None or norm.count is None else float(before[norm.count]) + norm.calls


def _agree(one: Tensor, other: Tensor, scale: float) -> bool:
    return float((one - other).abs().max()) <= max(_TOLERANCE, 4 * torch.finfo(one.dtype).eps) * scale
