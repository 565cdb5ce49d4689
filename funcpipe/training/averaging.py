"""Averages of a model's parameters over training steps, as `torch.optim.swa_utils.AveragedModel` computes them.

Each stage averages its own parameters after each update, so no function needs to ask another. The average is part of
the stage's state: checkpoints hold it, and a run that is resumed goes on with the same bits.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn

from funcpipe.core import checks
from funcpipe.errors import InvalidValue
from funcpipe.training.state import AVERAGE, AVERAGED, StageState, mismatch_is_corrupt, tensor_names, with_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EMA:
    """The exponential moving average: after each step, `decay` of the average and 1 - `decay` of the parameters.

    It begins with the parameters after the first step. With `use_buffers`, buffers are averaged too.
    """

    decay: float = 0.999
    use_buffers: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise InvalidValue("decay", self.decay, "must be between 0 and 1")

    def takes(self, steps_done: int) -> bool:
        """Return True: the parameters count as they are after any number of steps."""
        return True

    def mix(self, averaged: Sequence[Tensor], current: Sequence[Tensor], count: int) -> None:
        """Take `current` into `averaged`, in place."""
        mix = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        for one, other in zip(averaged, current, strict=True):  # one by one, as `mix` takes tensors of one dtype only
            mix([one], [other], count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SWA:
    """The plain average of the parameters after step `start_step`, counted from 1, and each `every_steps` steps later.

    With `use_buffers`, buffers are averaged too.
    """

    start_step: int
    every_steps: int = 1
    use_buffers: bool = False

    def __post_init__(self) -> None:
        checks.at_least("start_step", self.start_step, 1)
        checks.at_least("every_steps", self.every_steps, 1)

    def takes(self, steps_done: int) -> bool:
        """Return True if the parameters count as they are after so many steps."""
        return steps_done >= self.start_step and (steps_done - self.start_step) % self.every_steps == 0

    def mix(self, averaged: Sequence[Tensor], current: Sequence[Tensor], count: int) -> None:
        """Take `current` into `averaged`, the mean of `count` values so far, in place."""
        mean = get_swa_avg_fn()  # type: ignore[no-untyped-call]
        for one, other in zip(averaged, current, strict=True):
            one.copy_(mean(one, other, torch.tensor(count)))


class WeightAverage:
    """The average of one stage's parameters that training changes, and of its buffers if that is asked for."""

    def __init__(self, average: EMA | SWA, stage: nn.Module, teachers: Collection[nn.Parameter] = ()) -> None:
        """Besides those that are trained, the parameters of `teachers` change."""
        self._average = average
        self._stage = stage
        self._teachers = {id(parameter) for parameter in teachers}
        self._averaged: dict[str, Tensor] = {}
        self._count = 0

    @property
    def _current(self) -> dict[str, Tensor]:
        """The averaged tensors, as they are now: a forward may have put another tensor in the place of a buffer."""
        return {
            name: tensor
            for name, tensor in tensor_names(self._stage)[0].items()
            if (self._changes(tensor) if isinstance(tensor, nn.Parameter) else self._average.use_buffers)
        }

    def _changes(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or id(parameter) in self._teachers

    @torch.no_grad()
    def update(self, steps_done: int) -> None:
        """Take the parameters into the average, as they are after so many steps, if they count."""
        if not self._average.takes(steps_done):
            return
        if self._count == 0:
            self._averaged = {name: tensor.detach().clone() for name, tensor in self._current.items()}
        else:
            current = [tensor.detach() for tensor in self._current.values()]
            self._average.mix(list(self._averaged.values()), current, self._count)
        self._count += 1

    def added_to(self, state: StageState) -> StageState:
        """Return `state` with the average; its tensors are not copied."""
        tensors = {AVERAGED + name: tensor for name, tensor in self._averaged.items()}
        return with_settings(state, {AVERAGE: {"count": self._count}}, tensors)

    def restore(self, state: StageState) -> None:
        """Go back to the average in `state`. Raises CorruptMessage if it is not this stage's."""
        with mismatch_is_corrupt():
            saved: Mapping[str, Any] = state.settings.get(AVERAGE, {"count": 0})
            self._count = int(saved["count"])
            names = self._current if self._count else ()
            self._averaged = {name: state.tensors[AVERAGED + name].clone() for name in names}
