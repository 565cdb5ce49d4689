"""The order in which a stage runs the forwards and backwards of its micro-batches.

It follows from how many micro-batches a stage may have in flight, with their forward begun and their backward not
ended. No stage has fewer in flight than the stages after it, so no order here can deadlock, whatever tensors skip
stages.
"""

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


def in_flight(schedule: ScheduleKind, *, stage: int, stages: int, micro_batches: int) -> int:
    """Return the most micro-batches, of `micro_batches`, whose activations a function of `stage` holds at once."""
    to_the_end = stages - stage
    match schedule:
        case ScheduleKind.GPIPE:
            return micro_batches
        case ScheduleKind.ONE_F_ONE_B:
            return min(micro_batches, to_the_end)
        case ScheduleKind.EAGER_ONE_F_ONE_B:
            return min(micro_batches, 2 * to_the_end - 1)


def actions(
    schedule: ScheduleKind, micro_batches: Sequence[int], *, stage: int = 0, stages: int = 1
) -> tuple[Action, ...]:
    """Return the order of one stage's computation for `micro_batches`, given in ascending order."""
    if schedule is ScheduleKind.GPIPE:
        return _gpipe(micro_batches)
    held = in_flight(schedule, stage=stage, stages=stages, micro_batches=len(micro_batches))
    return _one_forward_one_backward(micro_batches, held)


def _gpipe(micro_batches: Sequence[int]) -> tuple[Action, ...]:
    """Return all forwards in ascending order, then all backwards in descending order (GPipe; FuncPipe section 3.1).

    ::

        stage 0   F0 F1 F2          B2 B1 B0
        stage 1      F0 F1 F2    B2 B1 B0
        stage 2         F0 F1 F2 B2 B1 B0
    """
    forwards = tuple(Action(False, m) for m in micro_batches)
    backwards = tuple(Action(True, m) for m in reversed(micro_batches))
    return forwards + backwards


def _one_forward_one_backward(micro_batches: Sequence[int], held: int) -> tuple[Action, ...]:
    """Return `held` forwards, then backwards and forwards by turns, then the other backwards; all in ascending order.

    With one micro-batch in flight for each stage to the end this is 1F1B (PipeDream-Flush, Narayanan et al., ICML
    2021); with 2 n - 1 for n stages to the end, eager 1F1B (Zhuang et al., MLSys 2023), which covers transfers that
    take as long between two stages as a stage computes.

    ::

        stage 0   F0 F1 F2       B0 F3 B1    B2    B3
        stage 1      F0 F1    B0 F2 B1 F3 B2    B3
        stage 2         F0 B0 F1 B1 F2 B2 F3 B3
    """
    order = [Action(False, m) for m in micro_batches[:held]]
    for place, m in enumerate(micro_batches):
        order.append(Action(True, m))
        order += [Action(False, later) for later in micro_batches[place + held : place + held + 1]]
    return tuple(order)
