"""Our own schedules, ways of synchronising and policies pass the suites that others' must pass."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from funcpipe.comm.collectives import pattern, transfers
from funcpipe.comm.sum_pattern import Pattern, Transfer
from funcpipe.core import ScheduleKind, Streams, Sync
from funcpipe.partitioner import Policy, find_policy, policies
from funcpipe.scheduler import pipeline as schedules
from funcpipe.scheduler.pipeline import Action
from funcpipe.testing.policy_contract import PolicyContract
from funcpipe.testing.schedule_contract import Schedule, ScheduleContract
from funcpipe.testing.sync_contract import SyncContract, Way

LEFT_OUT = ("hybridps", "hybridps-ga", "bayes")
"""Two have a server and are priced by rules of their own; the last is tried in `partitioner/test_policies.py`."""


class Named:
    """One of our schedules."""

    def __init__(self, kind: ScheduleKind) -> None:
        self.actions = partial(schedules.actions, kind)
        self.in_flight = partial(schedules.in_flight, kind)


class Reversed(Named):
    """No schedule: the first stage goes back before the others do."""

    def __init__(self) -> None:
        super().__init__(ScheduleKind.GPIPE)
        self.actions = _crossed  # type: ignore[assignment]


def _crossed(micro_batches: Sequence[int], *, stage: int, stages: int) -> tuple[Action, ...]:
    order = schedules.actions(ScheduleKind.ONE_F_ONE_B, micro_batches, stage=stages - 1 - stage, stages=stages)
    return tuple(order)


class TestSchedules(ScheduleContract):
    @pytest.fixture(params=ScheduleKind, ids=lambda kind: kind.value)
    def schedule(self, request: pytest.FixtureRequest) -> Schedule:
        return Named(request.param)


class TestWaysOfSynchronising(SyncContract):
    @pytest.fixture(
        params=[(sync, cut) for sync in Sync for cut in (None, Streams(3, 2, 2))], ids=lambda p: f"{p[0].value}-{p[1]}"
    )
    def way(self, request: pytest.FixtureRequest) -> Way:
        sync, cut = request.param
        return lambda replicas: pattern(sync, replicas, cut)


class TestPolicies(PolicyContract):
    @pytest.fixture(params=[name for name in policies() if name not in LEFT_OUT])
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        return find_policy(request.param)


def test_orders_that_cross_are_found() -> None:
    with pytest.raises(AssertionError):
        ScheduleContract().test_stages_never_wait_for_each_other_for_ever(Reversed())


def test_a_sum_that_lacks_a_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading_one_twice(chosen: Pattern, replica: int) -> tuple[Transfer, ...]:
        return tuple(replace(t, peer=1) if replica == 0 and t.peer == 2 else t for t in transfers(chosen, replica))

    monkeypatch.setattr("funcpipe.testing.sync_contract.transfers", reading_one_twice)
    with pytest.raises(AssertionError):
        SyncContract().test_every_replica_has_every_sum_of_all_ranks(lambda n: pattern(Sync.EXCHANGE, n))
