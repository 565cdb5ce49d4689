"""What a stage's forwards leave for the next ones: attributes, buffers, and running statistics of norms.

One process runs F0 B0 F1 B1; a stage may run F0 F1 B0 B1. So each forward works on copies: tensors that F0 saved for B0
stay as they were while F1 changes its own in place. Recomputation runs F0 again for B0, with what F0 had begun with,
and what F1 has left by then is put back afterwards.

Over replicas, running statistics become what one process that runs all micro-batches of the step in order has. A norm
updates a running average by r <- (1 - momentum) r + momentum x for each micro-batch's statistic x. That is
linear, so each replica can compute its own share: with the average set to zero before a forward, the forward leaves
momentum x in it. Micro-batch i of M contributes that times (1 - momentum)^(M - 1 - i), if the layer is called once per
forward. With momentum 0.1 and M = 3:

    r = 0.9^3 r_old + 0.9^2 (0.1 x_0) + 0.9 (0.1 x_1) + (0.1 x_2)

where replica 0 of two adds the terms of x_0 and x_2, and replica 1 that of x_1. With gradient checkpointing inside the
model, a process calls the layer again in each backward, which adds the same x once more. A single replica needs none of
this, but for that: its statistics stay in their buffers (`CarriedValues`).
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import Statistic
from funcpipe.model.graph.program import attribute
from funcpipe.model.split import StageModule
from funcpipe.model.split.module_state import decode_attributes, read_attributes, write_attributes
from funcpipe.model.tensors import same
from funcpipe.training.device import numbers


@dataclass(frozen=True)
class _Values:
    """Attributes as plain data with their tensors, and buffers by name: those of the module, not copies."""

    attributes: dict[str, Any]
    tensors: dict[str, Tensor]
    buffers: dict[str, Tensor]


class CarriedValues:
    """The attributes and buffers that the forwards of a stage leave for the next ones; many stages have none."""

    def __init__(self, stage: StageModule, statistics: Sequence[Statistic] = (), *, recompute: bool) -> None:
        """The buffers of `statistics` are among these. With `recompute`, what each forward begins with is kept for its
        second run.
        """
        self._stage = stage
        self._recompute = recompute
        averaged = {id(attribute(stage, name)) for item in statistics for name in item.buffers}
        named = stage.named_buffers(remove_duplicate=False)
        self._buffers = (*stage.carried.buffers, *(name for name, buffer in named if id(buffer) in averaged))
        self._any = bool(stage.carried.blocks or self._buffers)
        self._before: dict[int, _Values] = {}
        self._start: _Values | None = None

    def begin_step(self) -> None:
        """Forget what the forwards of the step before began with; what this one begins with is kept, uncopied."""
        self._before = {}
        self._start = self._read() if self._any else None

    def undo_step(self) -> None:
        """Go back to what the step began with."""
        if self._start is not None:
            self._write(self._start)

    def before_forward(self, micro_batch: int) -> None:
        """Let the forward of `micro_batch` work on copies."""
        if not self._any:
            return
        values = self._read()
        self._write(values)
        if self._recompute:
            self._before[micro_batch] = values

    @contextlib.contextmanager
    def recomputing(self, micro_batch: int) -> Iterator[None]:
        """Within this context, the stage has what the forward of `micro_batch` began with."""
        if not self._any:
            yield
            return
        now = self._read()
        self._write(self._before.pop(micro_batch))
        try:
            yield
        finally:
            self._write(now)

    def _read(self) -> _Values:
        carried, tensors = self._stage.carried, dict[str, Tensor]()
        attributes = read_attributes(self._stage, carried.blocks, carried.attributes, tensors)
        buffers: dict[str, Tensor] = {name: attribute(self._stage, name) for name in self._buffers}
        return _Values(attributes, tensors, buffers)

    def _write(self, values: _Values) -> None:
        """Give the stage copies of `values`."""
        write_attributes(self._stage, decode_attributes(values.attributes, values.tensors))
        copies: dict[int, Tensor] = {}
        for name, buffer in values.buffers.items():
            path, _, key = name.rpartition(".")
            owner: nn.Module = attribute(self._stage, path) if path else self._stage
            owner._buffers[key] = copies.setdefault(id(buffer), buffer.detach().clone())


class RunningStatistics:
    """The running statistics of one replica of a stage.

    In each step call `begin_step`, then `after_forward` after each forward, then `contributions`, sum these over the
    stage's replicas, and call `finish_step` with the sum. In between, the buffers hold no meaningful values.

    Replicas that train alone call `keep_step` after each step, with which the buffers go back to what they were before
    it. Then the next step `goes_on`: contributions are those of all steps since `finish_step`.
    """

    def __init__(self, stage: StageModule, statistics: Sequence[Statistic]) -> None:
        self._averages = [_Average(stage, statistic) for statistic in statistics]
        self._micro_batches = 0
        self._counted: set[int] = set()
        self.begin_step(0)
        if self._averages:
            stage.register_forward_pre_hook(_weak_hook(weakref.WeakMethod(self._clear)), prepend=True)

    def begin_step(self, micro_batches: int, *, goes_on: bool = False) -> None:
        """Start a step of `micro_batches` micro-batches on all replicas together."""
        self._micro_batches = micro_batches
        self._counted = set()
        for average, count in zip(self._averages, self._counts(), strict=True):
            average.begin_step(count or 0, micro_batches if goes_on else None)

    def after_forward(self, micro_batch: int) -> None:
        """Add what the forward of `micro_batch`, numbered over all replicas, left in the buffers.

        A second forward of the same micro-batch, which recomputation makes, adds nothing.
        """
        if micro_batch in self._counted:
            return
        self._counted.add(micro_batch)
        for average, count in zip(self._averages, self._counts(), strict=True):
            average.accumulate(micro_batch, self._micro_batches - 1 - micro_batch, count)

    def _counts(self) -> list[int | None]:
        """Return the calls that the averages' norms have counted; None for one that counts none."""
        read = iter(numbers([average.count for average in self._averages if average.count is not None]))
        return [None if average.count is None else round(next(read)) for average in self._averages]

    def contributions(self) -> list[Tensor]:
        """This replica's share of the step's change, one flat tensor per Statistic, to be summed over replicas."""
        return [average.sum for average in self._averages]

    def finish_step(self, summed: list[Tensor]) -> None:
        """Set the buffers to one process's values, from the sum of all replicas' `contributions`."""
        for average, total, calls in zip(self._averages, summed, numbers([t[-1] for t in summed]), strict=True):
            average.finish_step(total[:-1], round(calls))

    def undo_step(self) -> None:
        """Set the buffers to what they were before the step."""
        for average in self._averages:
            average.sum = average.sum_before
            average.write(average.old, average.old_count)

    def keep_step(self) -> None:
        """Keep the contributions, and set the buffers to what they were before the step."""
        for average in self._averages:
            average.write(average.old, average.old_count)

    def begin_anew(self) -> None:
        """Count the contributions from here on, between two steps of which the later one `goes_on`."""
        for average in self._averages:
            average.sum = torch.zeros_like(average.sum)

    def kept(self) -> dict[str, Tensor]:
        """Return the contributions of the steps since `finish_step` by the names of the first buffers they are for."""
        return {average.statistic.names[0]: average.sum for average in self._averages}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Go back to what `kept` returned, between two steps."""
        for average in self._averages:
            average.sum = kept[average.statistic.names[0]].clone()

    def _clear(self) -> None:
        for average in self._averages:
            average.clear()


def _weak_hook(method: weakref.WeakMethod[Any]) -> Any:
    """Return a hook of a module that calls `method` but does not keep its object alive."""

    def before(module: nn.Module, args: Any) -> None:
        call = method()
        if call is not None:
            call()

    return before


class _Average:
    """The buffers of one Statistic: their values before the step, and the weighted sum of what the step adds.

    `sum` holds all its averages, flattened, and one element more: the number of calls.
    """

    def __init__(self, stage: StageModule, statistic: Statistic) -> None:
        self.statistic = statistic
        self.buffers: list[Tensor] = [attribute(stage, name) for name in statistic.names]
        self.count: Tensor | None = None if statistic.count is None else attribute(stage, statistic.count)

    def begin_step(self, count: int, micro_batches: int | None = None) -> None:
        """Start a step after `count` calls: with nothing summed, or else with the sum of steps before, behind which
        come `micro_batches` forwards.
        """
        self.old = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        self.old_count = count
        if micro_batches is None:
            self.sum = self.old.new_zeros(self.old.numel() + 1)
        self.sum_before, self.sum = self.sum, self.sum.clone()
        if micro_batches and self.statistic.momentum is not None:
            self.sum[:-1].mul_((1.0 - self.statistic.momentum) ** (self._calls * micro_batches))

    @property
    def _calls(self) -> int:
        """The calls of the norm that one process makes for a micro-batch, in its forward and its backward."""
        return self.statistic.calls * (2 if self.statistic.again else 1)

    def clear(self) -> None:
        """Zero the buffers unseen by autograd, which saves them for the backward but reads them in eval mode only."""
        if self.statistic.calls:
            for buffer in self.buffers if self.count is None else (self.count, *self.buffers):
                buffer.data.zero_()

    def accumulate(self, micro_batch: int, later: int, count: int | None) -> None:
        """Add what the forward of `micro_batch` left in the cleared buffers, with so many calls counted; `later` ones
        of the step follow it.
        """
        calls, momentum = self._calls, self.statistic.momentum
        found = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        if not calls:
            self._check(same(self.old, found), micro_batch)
            return
        self._check(count is None or count == self.statistic.calls, micro_batch)
        factor = 1.0
        if self.statistic.again:
            factor += 1.0 if momentum is None else (1.0 - momentum) ** self.statistic.calls
        weight = float(self.statistic.calls) if momentum is None else (1.0 - momentum) ** (calls * later)
        self.sum[:-1].add_(found, alpha=weight * factor)
        self.sum[-1] += calls

    def _check(self, is_as_traced: bool, micro_batch: int) -> None:
        if not is_as_traced:
            path = self.statistic.path
            raise ModelError(
                f"{path} was called {self.statistic.calls} times in each forward of the tracing, but not "
                f"in that of micro-batch {micro_batch}: replicas cannot add up running statistics of a norm that only "
                "some forwards call; plan with replicas=(1,) and without gradient checkpointing around it, or take a "
                "norm that keeps none, such as GroupNorm or LayerNorm"
            )

    def finish_step(self, added: Tensor, calls: int) -> None:
        """Set the buffers to what they were before the step with what is `added`, of so many calls."""
        if not calls:
            return
        if self.statistic.momentum is None:
            new = (self.old * self.old_count + added) / (self.old_count + calls)
        else:
            new = self.old * (1.0 - self.statistic.momentum) ** calls + added
        self.old, self.old_count = new, self.old_count + calls
        self.write(self.old, self.old_count)

    def write(self, averages: Tensor, count: int) -> None:
        """Set the buffers to `averages`, flattened, of `count` calls."""
        sizes = [buffer.numel() for buffer in self.buffers]
        for buffer, part in zip(self.buffers, torch.split(averages, sizes), strict=True):
            buffer.copy_(part.view_as(buffer))
        if self.count is not None:
            self.count.fill_(count)
