"""In which order a stage runs the forwards and backwards of its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.core import ScheduleKind


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or the backward of one micro-batch; prints as `F3` or `B3`."""

    backward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro_batch}"


def actions(schedule: ScheduleKind, micro_batches: Sequence[int]) -> tuple[Action, ...]:
    """The order of one stage's computation for `micro_batches`, given in ascending order."""
    match schedule:
        case ScheduleKind.GPIPE:
            return _gpipe(micro_batches)


def _gpipe(micro_batches: Sequence[int]) -> tuple[Action, ...]:
    """All forwards in ascending order, then all backwards in descending order (GPipe; FuncPipe section 3.1).

    ::

        stage 0   F0 F1 F2          B2 B1 B0
        stage 1      F0 F1 F2    B2 B1 B0
        stage 2         F0 F1 F2 B2 B1 B0
    """
    forwards = tuple(Action(False, m) for m in micro_batches)
    backwards = tuple(Action(True, m) for m in reversed(micro_batches))
    return forwards + backwards
