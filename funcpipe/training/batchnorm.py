"""BatchNorm's running statistics over replicas, as if one process had run all micro-batches of the step in order.

BatchNorm updates a running average by r <- (1 - momentum) r + momentum x for each micro-batch's statistic x. That is
linear, so each replica can compute its own share: with the average set to zero before a forward, the forward leaves
momentum x in it. Micro-batch i of M contributes that times (1 - momentum)^(M - 1 - i), if the layer is called once per
forward. With momentum 0.1 and M = 3:

    r = 0.9^3 r_old + 0.9^2 (0.1 x_0) + 0.9 (0.1 x_1) + (0.1 x_2)

where replica 0 of two adds the terms of x_0 and x_2, and replica 1 that of x_1.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.values import Statistic
from funcpipe.model.split import StageModule


class RunningStatistics:
    """The running statistics of one replica of a stage.

    In each step call `begin_step`, then `after_forward` after each forward, then `contributions`, sum these over the
    stage's replicas, and call `finish_step` with the sum. In between, the buffers hold no meaningful values.
    """

    def __init__(self, stage: StageModule) -> None:
        self._averages = [_Average(stage, statistic) for statistic in stage.statistics]
        self._micro_batches = 0
        self._counted: set[int] = set()
        if self._averages:
            stage.register_forward_pre_hook(_weak_hook(weakref.WeakMethod(self._clear)), prepend=True)

    def begin_step(self, micro_batches: int) -> None:
        """Start a step of `micro_batches` micro-batches on all replicas together."""
        self._micro_batches = micro_batches
        self._counted = set()
        for average in self._averages:
            average.begin_step()

    def after_forward(self, micro_batch: int) -> None:
        """Add what the forward of `micro_batch`, numbered over all replicas, left in the buffers.

        A second forward of the same micro-batch, which recomputation makes, adds nothing.
        """
        if micro_batch in self._counted:
            return
        self._counted.add(micro_batch)
        for average in self._averages:
            average.accumulate(self._micro_batches - 1 - micro_batch)

    def contributions(self) -> list[Tensor]:
        """This replica's share of the step's change, one flat tensor per Statistic, to be summed over replicas."""
        return [average.sum for average in self._averages]

    def finish_step(self, summed: list[Tensor]) -> None:
        """Set the buffers to one process's values, from the sum of all replicas' `contributions`."""
        for average, total in zip(self._averages, summed, strict=True):
            average.finish_step(total)

    def undo_step(self) -> None:
        """Set the buffers to what they were before the step."""
        for average in self._averages:
            average.write(average.old, average.old_count)

    def _clear(self) -> None:
        for average in self._averages:
            average.clear()


def _weak_hook(method: weakref.WeakMethod[Any]) -> Any:
    """A hook of a module that calls `method` but does not keep its object alive."""

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
        self.momentum = statistic.momentum
        self.buffers: list[Tensor] = [attribute(stage, name) for name in statistic.names]
        self.count: Tensor = attribute(stage, statistic.count)
        self.begin_step()

    def begin_step(self) -> None:
        self.old = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        self.old_count = int(self.count)
        self.sum = torch.zeros(self.old.numel() + 1, dtype=self.old.dtype)

    def clear(self) -> None:
        """Zero the buffers unseen by autograd, which saves them for the backward but reads them in eval mode only."""
        for buffer in (self.count, *self.buffers):
            buffer.data.zero_()

    def accumulate(self, later: int) -> None:
        """Add what one forward left in the cleared buffers; `later` micro-batches of the step follow it."""
        calls = int(self.count)
        weight = float(calls) if self.momentum is None else (1.0 - self.momentum) ** (calls * later)
        self.sum[:-1].add_(torch.cat([buffer.reshape(-1) for buffer in self.buffers]), alpha=weight)
        self.sum[-1] += calls

    def finish_step(self, total: Tensor) -> None:
        added, calls = total[:-1], round(total[-1].item())
        if self.momentum is None:
            new = (self.old * self.old_count + added) / max(self.old_count + calls, 1)
        else:
            new = self.old * (1.0 - self.momentum) ** calls + added
        self.write(new, self.old_count + calls)

    def write(self, averages: Tensor, count: int) -> None:
        """Set the buffers to `averages`, flattened, of `count` calls."""
        sizes = [buffer.numel() for buffer in self.buffers]
        for buffer, part in zip(self.buffers, torch.split(averages, sizes), strict=True):
            buffer.copy_(part.view_as(buffer))
        self.count.fill_(count)
