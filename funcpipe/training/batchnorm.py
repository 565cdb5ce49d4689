"""BatchNorm's running statistics over replicas: as if one process had run all micro-batches of the step in order.

The average moves by r <- (1 - momentum) r + momentum x with each micro-batch's statistic x, which is linear. With the
averages at zero before a forward, what a forward leaves in them is its own contribution; the contribution of
micro-batch i of M then counts (1 - momentum)^(calls in the M - 1 - i later ones), whichever replica ran it.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.values import Statistic
from funcpipe.model.split import StageModule


class RunningStatistics:
    """The running statistics of one replica of a stage, for one step after another.

    Per step: `begin`, then `after_forward` behind each forward, then `contributions`, which are to be summed over the
    stage's replicas, then `finish` with the sum. Between `begin` and `finish` the buffers themselves hold nothing of
    use.
    """

    def __init__(self, stage: StageModule) -> None:
        self._averages = [_Average(stage, statistic) for statistic in stage.statistics]
        self._micro_batches = 0
        self._counted: set[int] = set()
        if self._averages:
            clear = weakref.WeakMethod(self._clear)
            stage.register_forward_pre_hook(_weakly(clear), prepend=True)

    def begin(self, micro_batches_total: int) -> None:
        """Start a step of so many micro-batches, those of all replicas."""
        self._micro_batches = micro_batches_total
        self._counted = set()
        for average in self._averages:
            average.begin()

    def after_forward(self, micro_batch: int) -> None:
        """Take what the forward of `micro_batch` (numbered over all replicas) just left; a second time changes
        nothing.
        """
        if micro_batch in self._counted:
            return
        self._counted.add(micro_batch)
        for average in self._averages:
            average.take(self._micro_batches - 1 - micro_batch)

    def contributions(self) -> list[Tensor]:
        """This replica's part of the step's change, one flat float tensor for each data type; to be summed over
        replicas.
        """
        return [average.sum for average in self._averages]

    def finish(self, summed: list[Tensor]) -> None:
        """Set the buffers to what one process would have, from the sum of all replicas' `contributions`."""
        for average, total in zip(self._averages, summed, strict=True):
            average.finish(total)

    def _clear(self) -> None:
        for average in self._averages:
            average.clear()


def _weakly(method: weakref.WeakMethod[Any]) -> Any:
    def before(module: nn.Module, args: Any) -> None:
        call = method()
        if call is not None:
            call()

    return before


class _Average:
    """The buffers of one Statistic: their values before the step, and the weighted sum of what the step adds."""

    def __init__(self, stage: StageModule, statistic: Statistic) -> None:
        self.momentum = statistic.momentum
        self.buffers: list[Tensor] = [attribute(stage, name) for name in statistic.names]
        self.count: Tensor = attribute(stage, statistic.count)
        self.begin()

    def begin(self) -> None:
        self.old = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        self.old_count = int(self.count)
        self.sum = torch.zeros(self.old.numel() + 1, dtype=self.old.dtype)  # of the averages, and of the calls

    def clear(self) -> None:
        """Zero the buffers behind autograd's back: it keeps them for the backward, but reads them in eval mode only."""
        for buffer in (self.count, *self.buffers):
            buffer.data.zero_()

    def take(self, later: int) -> None:
        """Add what one forward left in the cleared buffers; `later` micro-batches follow it."""
        calls = int(self.count)
        weight = float(calls) if self.momentum is None else (1.0 - self.momentum) ** (calls * later)
        self.sum[:-1].add_(torch.cat([buffer.reshape(-1) for buffer in self.buffers]), alpha=weight)
        self.sum[-1] += calls

    def finish(self, total: Tensor) -> None:
        added, calls = total[:-1], round(total[-1].item())
        if self.momentum is None:
            new = (self.old * self.old_count + added) / max(self.old_count + calls, 1)
        else:
            new = self.old * (1.0 - self.momentum) ** calls + added
        sizes = [buffer.numel() for buffer in self.buffers]
        for buffer, part in zip(self.buffers, torch.split(new, sizes), strict=True):
            buffer.copy_(part.view_as(buffer))
        self.count.fill_(self.old_count + calls)
