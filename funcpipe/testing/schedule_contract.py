"""What every schedule must do, as a suite for pytest.

A test module of a schedule gives the fixture `schedule` and inherits the suite. The same functions as in
`funcpipe.scheduler.pipeline`, without the name of the schedule, make a `Schedule`.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

from funcpipe.scheduler.pipeline import Action

SHAPES = tuple(itertools.product(range(1, 6), (0, 1, 2, 3, 4, 7, 12)))
"""Numbers of stages and of micro-batches that are tried."""


class Schedule(Protocol):
    """The order of one stage's computation, and how much it holds."""

    def actions(self, micro_batches: Sequence[int], *, stage: int, stages: int) -> tuple[Action, ...]:
        """The forwards and backwards of a stage, in order, for `micro_batches`, given in ascending order."""

    def in_flight(self, *, stage: int, stages: int, micro_batches: int) -> int:
        """How many micro-batches' activations the stage holds at once: what the memory formula multiplies."""


class ScheduleContract:
    """Inherit this; every method takes the fixture `schedule`."""

    def test_each_micro_batch_goes_forward_once_and_then_back_once(self, schedule: Schedule) -> None:
        """In every stage."""
        for stages, count in SHAPES:
            for order in _orders(schedule, stages, count):
                every = [Action(backward, m) for backward in (False, True) for m in range(count)]
                assert sorted(order, key=str) == sorted(every, key=str)
                place = {action: i for i, action in enumerate(order)}
                assert all(place[Action(False, m)] < place[Action(True, m)] for m in range(count))

    def test_it_holds_what_it_says(self, schedule: Schedule) -> None:
        """Plans reserve memory for no more."""
        for stages, count in SHAPES:
            for stage, order in enumerate(_orders(schedule, stages, count)):
                held = itertools.accumulate(-1 if action.backward else 1 for action in order)
                assert max(held, default=0) == schedule.in_flight(stage=stage, stages=stages, micro_batches=count)

    def test_no_stage_holds_fewer_than_those_after_it(self, schedule: Schedule) -> None:
        """Of which it follows that tensors that skip stages cannot make them wait for each other for ever."""
        for stages, count in SHAPES:
            held = [schedule.in_flight(stage=s, stages=stages, micro_batches=count) for s in range(stages)]
            assert held == sorted(held, reverse=True)

    def test_stages_never_wait_for_each_other_for_ever(self, schedule: Schedule) -> None:
        """A forward needs that of the stage before, a backward that of the stage behind."""
        for stages, count in SHAPES:
            orders = _orders(schedule, stages, count)
            done: set[tuple[int, Action]] = set()
            heads = [0] * stages
            while ready := [s for s in range(stages) if heads[s] < len(orders[s]) and _may(orders, heads, s, done)]:
                for stage in ready:
                    done.add((stage, orders[stage][heads[stage]]))
                    heads[stage] += 1
            assert heads == [len(order) for order in orders]


def _orders(schedule: Schedule, stages: int, count: int) -> list[tuple[Action, ...]]:
    return [schedule.actions(range(count), stage=stage, stages=stages) for stage in range(stages)]


def _may(orders: Sequence[Sequence[Action]], heads: Sequence[int], stage: int, done: set[tuple[int, Action]]) -> bool:
    action = orders[stage][heads[stage]]
    source = stage + 1 if action.backward else stage - 1
    return not 0 <= source < len(orders) or (source, action) in done
