"""Watchers of many workers, and standbys: their requests do not grow with these, and they still know how each does."""

import itertools
from dataclasses import dataclass, field

import pytest

from funcpipe.client.control.verdict import Verdict
from funcpipe.client.control.watching import RunView, StepLoss, Watcher
from funcpipe.client.follow.results import Progress
from funcpipe.client.follow.standby import follow_as_standby
from funcpipe.core import RequestCounts
from funcpipe.platforms.base import Handle, Platform, RequestMeter, State, Status
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.liveness import READ_AT_ONCE, WorkerState, worker_names
from funcpipe.runstate.owner import owned
from funcpipe.runstate.reports import LOSSES_READ
from funcpipe.runstate.signing import signed
from tests.client.seen_run import COMPUTES, NOW_S, SeenRun
from tests.recording import Recording

INTERVAL_S = 5.5  # of `funcpipe run watch`, and a poll
SILENT_S = 30.0  # the lease and two heartbeats of FaultTolerance


@dataclass
class Asked(Recording):
    """Counts how often it is asked about functions, of which some are `dead`."""

    asked: int = 0
    dead: set[str] = field(default_factory=set)

    def status(self, handle: Handle) -> Status:
        self.asked += 1
        dead = Status(state=State.FAILED, reason="killed by SIGKILL")
        return dead if handle.worker in self.dead else super().status(handle)


class Many:
    """A run of two stages and many replicas, which send heartbeats in turn and report steps, and its watcher."""

    def __init__(self, replicas: int) -> None:
        self.run, self.platform, self.meter = SeenRun(replicas=replicas), Asked(), RequestMeter()
        self.workers = worker_names(self.run.record)
        self.now_s, self.numbers, self.step = NOW_S, itertools.count(1), 0
        for worker in self.workers:
            self.run.start(worker)
            self.beat(worker)
        self.watcher = Watcher(
            Counted(self.run.raw, self.meter), "run-1", self.opened, clock=lambda: self.now_s, pause=self.pause
        )

    def opened(self, _: str) -> Platform:
        return self.platform

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def beat(self, worker: str, attempt: int = 0) -> None:
        number = next(self.numbers)
        self.run.beat(worker, number, attempt=attempt, step=self.step, busy=(COMPUTES,), sent_at_s=self.now_s)

    def look(self, beating: set[str]) -> tuple[RunView, RequestCounts, int]:
        """Poll after an interval in which a step has ended and the workers `beating` have sent heartbeats.

        Returns the requests to the storage and to the platform, too.
        """
        self.now_s += INTERVAL_S
        for worker in self.workers:
            if worker in beating:
                self.beat(worker)
            if worker.startswith("s1."):
                self.run.report(self.step, float(worker.rpartition("r")[2]), worker=worker)
        self.step += 1
        before, asked = self.meter.counts, self.platform.asked
        view = self.watcher.poll()
        now = self.meter.counts
        counts = RequestCounts(lists=now.lists - before.lists, gets=now.gets - before.gets)
        return view, counts, self.platform.asked - asked

    def halves(self, turn: int) -> set[str]:
        """The workers that send a heartbeat in that interval, which is half as long as that of heartbeats."""
        return set(self.workers[turn % 2 :: 2])


@pytest.mark.parametrize("replicas", [20, 50])
@pytest.mark.parametrize("together", [False, True])
def test_requests_of_a_watcher_do_not_grow_with_workers(replicas: int, *, together: bool) -> None:
    many = Many(replicas)
    for turn in range(7):
        beating = set(many.workers) if turn % 2 else set()
        view, counts, asked = many.look(beating if together else many.halves(turn))
        assert {worker.state for worker in view.status.workers} == {WorkerState.WORKING}
        assert (view.done, view.losses[-1].loss) == (many.step, sum(range(LOSSES_READ)) / LOSSES_READ)
        if turn > 1:  # each heartbeat has been seen to change
            assert counts.lists <= 10
            assert counts.gets <= READ_AT_ONCE + LOSSES_READ + 4
            assert asked == 0


def test_heartbeats_of_all_workers_are_read_in_turn() -> None:
    many = Many(20)
    every = -(-len(many.workers) // READ_AT_ONCE)
    for _ in range(1 + 3 * every):
        view, _, _ = many.look(set(many.workers))
    assert all(view.beats[worker] >= 4 for worker in many.workers)
    assert all(view.lane_shares[worker] == {"compute": 1.0} for worker in many.workers)
    assert view.status.step >= many.step - every - 1


def test_a_function_that_died_is_dead_once_its_heartbeat_is_missed() -> None:
    many = Many(20)
    for turn in range(4):
        many.look(many.halves(turn))
    many.platform.dead.add("s0.r7")
    died_s, found = many.now_s, None
    for turn in range(9):
        view, _, asked = many.look(many.halves(turn) - {"s0.r7"})
        states = {worker.worker: worker.state for worker in view.status.workers}
        assert {state for worker, state in states.items() if worker != "s0.r7"} == {WorkerState.WORKING}
        if found is None and states["s0.r7"] is WorkerState.DEAD:
            found = many.now_s
            assert asked == 1
    assert found is not None
    assert found - died_s <= SILENT_S + 2 * INTERVAL_S
    assert view.status.verdict is Verdict.WAITING  # for that worker
    assert any(warning.startswith("s0.r7 is dead: killed by SIGKILL") for warning in view.warnings)


def test_a_successor_is_seen_with_its_first_heartbeat() -> None:
    many = Many(20)
    for turn in range(4):
        many.look(many.halves(turn))
    for worker in many.workers[-3:]:
        many.run.start(worker, 1)
        many.beat(worker, 1)
    view, _, _ = many.look(many.halves(4) - set(many.workers[-3:]))
    assert [worker.attempt for worker in view.status.workers] == [0] * 37 + [1] * 3
    assert {worker.state for worker in view.status.workers} == {WorkerState.WORKING}


def test_a_watcher_that_polls_rarely_reads_every_heartbeat() -> None:
    """That one has changed since says too little then."""
    many = Many(20)
    for _ in range(3):
        many.now_s += 20 * SILENT_S
        view, counts, asked = many.look(set(many.workers))
        assert {worker.state for worker in view.status.workers} == {WorkerState.WORKING}
        assert counts.gets >= len(many.workers)
        assert asked == len(many.workers)
        assert all(worker.heard_s == 0.0 for worker in view.status.workers)


def test_a_clock_that_is_set_back_hides_no_death() -> None:
    many = Many(20)
    for turn in range(4):
        many.look(many.halves(turn))
    many.now_s -= 86_400
    many.platform.dead.add("s0.r7")
    view, _, _ = many.look(set(many.workers) - {"s0.r7"})
    assert [worker.worker for worker in view.status.workers if worker.state is WorkerState.DEAD] == ["s0.r7"]


class EnoughError(Exception):
    """The standby has followed far enough."""


@pytest.mark.parametrize("replicas", [10, 60])
def test_requests_of_a_standby_do_not_grow_with_workers(replicas: int) -> None:
    many, steps, meter = Many(replicas), 12, RequestMeter()
    for worker in many.workers:
        if worker.startswith("s1."):
            for step in range(steps):
                many.run.report(step, float(step), worker=worker)
    seen: list[Progress] = []

    def see(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == steps:
            raise EnoughError

    with owned(many.run.storage, "run-1"), pytest.raises(EnoughError):
        follow_as_standby(signed(Counted(many.run.raw, meter)), many.run.record, see)
    assert [progress.loss for progress in seen] == [float(step) for step in range(steps)]
    assert {(progress.cost_usd, progress.elapsed_s) for progress in seen} == {(0.5, 60.0)}
    assert meter.counts.gets <= steps * LOSSES_READ + READ_AT_ONCE + 5
    assert meter.counts.lists <= 5


def test_losses_of_few_replicas_are_those_of_all() -> None:
    many = Many(3)
    view, _, _ = many.look(set(many.workers))
    assert view.losses == (StepLoss(step=0, loss=1.0),)
