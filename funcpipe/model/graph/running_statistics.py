"""Find the buffers that a forward changes: running statistics that replicas can add up, and others.

Replicas can add up statistics that are updated by r <- (1 - momentum) r + momentum x in each call, or that are plain
averages over all calls, if neither x nor any result depends on r. So the model runs once more from other statistics,
and must give the same. Statistics that a forward reads, or updates by another rule, are buffers like any other: each
forward leaves them for the next one.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.draws import GENERATORS, is_from_torch, reseed
from funcpipe.model.graph.equivalence import Example, example
from funcpipe.model.graph.inputs import Signature
from funcpipe.model.graph.isolation import Snapshot, forward_only, preserve_state
from funcpipe.model.graph.observations import Observation, difference_of
from funcpipe.model.graph.program import attribute, is_inside
from funcpipe.model.graph.user_code import class_and_line, first_difference, source_location, with_code
from funcpipe.model.graph.values import Statistic


@dataclass(frozen=True)
class ChangedBuffers:
    """The buffers that a forward changes: those of running statistics that replicas can add up, and all `others`.

    `reason` says why running statistics are among the others, if they are.
    """

    statistics: tuple[Statistic, ...]
    others: tuple[str, ...]
    reason: str = ""


def changed_buffers(
    model: nn.Module, signature: Signature, examples: Sequence[Example], tied_names: Sequence[tuple[str, ...]]
) -> ChangedBuffers:
    """The buffers that a forward of `model` changes, from `examples` of it, the first with a backward.

    Raises ModelError if two modules hold one of the buffers, or if a backward changes them in another way.
    """
    changed = {name for one in examples for name in (*one.result.buffers, *one.result.written)}
    late = examples[0].result.late
    _refuse_two_owners(model, changed, tied_names)
    norms = [norm for norm in _norms(model) if not changed.isdisjoint(norm.buffers)]
    if not norms:
        _refuse_changes_in_backward(model, late)
        return ChangedBuffers((), tuple(sorted(changed)))
    trial = _StatisticsTrial(model, signature, examples, norms)
    reason = trial.reader()
    found = [] if reason else [statistic for norm in norms if (statistic := trial.statistic(norm)) is not None]
    known = {name for item in found for name in item.buffers}
    _refuse_changes_in_backward(model, late if len(found) < len(norms) else late.keys() - known)
    if not reason and len(found) < len(norms):
        path = next(norm.path for norm in norms if norm.names[0] not in known)
        reason = (
            f"running statistics, which {path or 'the model'} ({class_and_line(model.get_submodule(path))}) does not "
            "update as r <- (1 - momentum) r + momentum x, with x independent of r"
        )
    return ChangedBuffers(tuple(found), tuple(sorted(changed - known)), reason)


def within_blocks(model: nn.Module, found: ChangedBuffers, blocks: Set[str]) -> ChangedBuffers:
    """`found` for a model of which `blocks` run as they are: their code may call a norm in some forwards only.

    What replicas add up there must be counted, so that this is noticed; norms that were not called are watched.
    """
    inside = {
        path
        for path, module in model.named_modules()
        if module.training
        and any(is_inside(path, outer) and (path != outer or not is_from_torch(module)) for outer in blocks)
    }
    uncounted = [s for s in found.statistics if s.count is None and s.path in inside]
    changed = {*found.others, *(name for item in found.statistics for name in item.buffers)}
    idle = [norm for norm in _norms(model) if norm.path in inside and changed.isdisjoint(norm.buffers)]
    statistics = (*(item for item in found.statistics if item not in uncounted), *(replace(s, calls=0) for s in idle))
    others = tuple(sorted({*found.others, *(name for item in uncounted for name in item.names)}))
    reason = found.reason
    if uncounted and not reason:
        reason = (
            f"running statistics of {uncounted[0].path}, which does not count its calls, in a block, whose code may "
            "call it in some forwards only"
        )
    return ChangedBuffers(statistics, others, reason)


def _refuse_two_owners(model: nn.Module, changed: Set[str], tied_names: Sequence[tuple[str, ...]]) -> None:
    for names in tied_names:
        owners = {id(attribute(model, name.rpartition(".")[0])) for name in names if "." in name}
        if len(owners) > 1 and not changed.isdisjoint(names):
            raise ModelError(
                f"the forward pass changes the buffer {names[0]}, which is {names[1]} too: two modules hold it; "
                "use one module in both places, or a buffer for each"
            )


def _refuse_changes_in_backward(model: nn.Module, names: Set[str] | Mapping[str, Tensor]) -> None:
    """Raise ModelError for buffers that a backward carries on: backwards run in another order than forwards."""
    for name in sorted(names):
        path = name.rpartition(".")[0]
        raise ModelError(
            f"the forward of {path or 'the model'} ({class_and_line(model.get_submodule(path))}) changes the buffer "
            f"{name}, and the backward pass changes it again for the next forward (by a hook, or by code that runs "
            "again in the backward, as under torch.utils.checkpoint), but micro-batches do not run backward in the "
            "order of one process; leave that module out of the checkpoint, or turn checkpointing off and let the plan "
            "recompute stages instead (recompute='allow')"
        )


def _norms(model: nn.Module) -> list[Statistic]:
    """All modules that hold running statistics as torch's norms do."""
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        momentum = getattr(module, "momentum", math.nan)
        held = dict(module.named_buffers(recurse=False))
        averages = [held[name] for name in ("running_mean", "running_var") if name in held]
        if len(averages) < 2 or not all(tensor.is_floating_point() for tensor in averages):
            continue
        if momentum is None or (isinstance(momentum, int | float) and 0 <= momentum <= 1):
            count = f"{prefix}num_batches_tracked" if "num_batches_tracked" in held else None
            found.append(Statistic((f"{prefix}running_mean", f"{prefix}running_var"), count, momentum))
    return found


_TOLERANCE = 1e-4
"""The largest difference between statistics that counts as rounding, relative to the largest that went into them."""

_MORE_CALLS = 1_000_000, 3
"""The calls that the other statistics count besides: enough for any warm-up; few if they weigh the statistics."""


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


class _StatisticsTrial:
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
        """Describe the code that depends on the statistics that a forward begins with; empty if there is none."""
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
    """The number of calls that leave as much of a statistic as one forward does; 0 if there is none."""
    assert norm.momentum is not None, "an average over all calls needs their number"
    if norm.momentum in (0, 1):
        return 1
    name = norm.names[0]
    left = (moved.after(name) - base.after(name)).double() / (moved.before[name] - base.before[name]).double()
    share = float(left.mean())
    return round(math.log(share) / math.log(1 - norm.momentum)) if 0 < share < 1 else 0


def _added(norm: Statistic, before: Mapping[str, Tensor], name: str, after: Tensor) -> Tensor:
    """The sum that the calls of a forward have added to a statistic, or to that of all calls if it is an average."""
    if norm.momentum is not None:
        return after - (1 - norm.momentum) ** norm.calls * before[name]
    weight = _weight(norm, before)
    return after * weight - before[name] * (weight - norm.calls)


def _weight(norm: Statistic, before: Mapping[str, Tensor]) -> float:
    """The number of calls by which to multiply a statistic after a forward, to compare it with others."""
    return 1.0 if norm.momentum is not None or norm.count is None else float(before[norm.count]) + norm.calls


def _agree(one: Tensor, other: Tensor, scale: float) -> bool:
    return float((one - other).abs().max()) <= max(_TOLERANCE, 4 * torch.finfo(one.dtype).eps) * scale
