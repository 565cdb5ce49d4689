"""What a watcher sees of a run, look by look, and how few requests that takes."""

import math
from dataclasses import replace

import pytest

from funcpipe.client.control.status import status
from funcpipe.client.control.verdict import Verdict
from funcpipe.client.control.watching import RunView, StepLoss, Watcher
from funcpipe.core import Bill, Estimate, FinishedRun, Halt, Outcome
from funcpipe.errors import PlatformError, RunUnknown
from funcpipe.platforms.base import Platform, RequestMeter
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import write_record
from funcpipe.runstate.halt import halt_run
from tests.client.seen_run import COMPUTES, NOW_S, WAITS, SeenRun, left


@pytest.fixture
def run() -> SeenRun:
    """Two workers that have begun."""
    run = SeenRun()
    for worker in ("s0.r0", "s1.r0"):
        run.start(worker)
        run.beat(worker, 1)
    return run


class Clock:
    """A clock that tests set, and advance by pausing."""

    def __init__(self) -> None:
        self.now_s = NOW_S + 1

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def watcher(run: SeenRun, clock: Clock | None = None) -> Watcher:
    clock = clock or Clock()
    return Watcher(run.raw, "run-1", run.platform.open, clock=clock, pause=clock.pause)


def test_a_look_tells_what_workers_do_and_what_the_run_costs(run: SeenRun) -> None:
    plan = replace(run.record.plan, estimate=ESTIMATE)
    write_record(run.storage, run.keys, replace(run.record, plan=plan))
    run.beat("s1.r0", 2, step=4, busy=(COMPUTES,), step_s=2.0)
    run.beat("s0.r0", 2, step=3, busy=(WAITS,), step_s=2.0)
    view = watcher(run).poll()
    assert (view.status.verdict, view.done, view.status.steps) == (Verdict.RUNNING, 3, 16)
    assert [worker.busy for worker in view.status.workers] == [(WAITS,), (COMPUTES,)]
    assert (view.step_s, view.left_s) == (2.0, 26.0)
    assert view.expected_usd == pytest.approx(0.5 * (60 + 26) / 60)
    assert view.planned_s == 1.5
    assert view.planned_usd == pytest.approx(16 * 0.01)
    assert view.warnings == ()
    assert not view.has_ended


ESTIMATE = Estimate(
    iteration_s=1.5,
    cost_usd=0.01,
    compute_usd=0.01,
    request_usd=0.0,
    peak_memory_bytes=1,
    puts=1,
    gets=1,
    bottleneck="compute of stage 0",
    stages=(),
)


def test_losses_come_from_summaries_and_from_the_newest_step(run: SeenRun) -> None:
    run.summarise([3.0, 2.0])
    for step, loss in ((2, 1.5), (3, math.nan), (4, 1.0)):
        run.report(step, loss, skipped=step == 4)
    watching = watcher(run)
    view = watching.poll()
    assert view.losses == (StepLoss(step=0, loss=3.0), StepLoss(step=1, loss=2.0), StepLoss(step=4, loss=1.0))
    assert (view.first_loss, view.done, view.skipped) == (view.losses[0], 5, 1)
    assert view.warnings == ("1 step updated nothing, as its gradients were not finite",)
    run.summarise([3.0, 2.0, 1.5, 1.2, 1.0])
    assert [found.loss for found in watching.poll().losses] == [3.0, 2.0, 1.5, 1.2, 1.0]


def test_the_pace_is_the_one_that_the_watcher_sees(run: SeenRun) -> None:
    clock = Clock()
    watching = watcher(run, clock)
    watching.poll()
    clock.now_s += 12
    run.beat("s0.r0", 2, sent_at_s=clock.now_s)
    run.beat("s1.r0", 2, sent_at_s=clock.now_s)
    run.report(8, 1.0)
    assert watching.poll().step_s == pytest.approx(12 / 6)


def test_lanes_have_the_share_of_heartbeats_in_which_they_had_a_task(run: SeenRun) -> None:
    watching = watcher(run)
    for number, busy in ((1, (COMPUTES, COMPUTES)), (2, (COMPUTES, WAITS)), (2, ()), (3, ()), (4, (WAITS,))):
        run.beat("s0.r0", number, busy=busy)
        view = watching.poll()
    assert view.beats["s0.r0"] == 4
    assert view.lane_shares["s0.r0"] == {"compute": 0.5, "download": 0.5}


def test_restarts_and_hand_overs_say_why(run: SeenRun) -> None:
    run.start("s0.r0", 1, before=left("s0.r0", Outcome.HANDED_OVER))
    run.start("s1.r0", 1, before=left("s1.r0", Outcome.FAILED, "StorageBusy: for a minute"))
    run.beat("s1.r0", 1, attempt=1)
    run.start("s1.r0", 2)
    watching = watcher(run)
    assert {(one.worker, one.attempt): one.reason for one in watching.poll().successions} == {
        ("s0.r0", 1): "after attempt 0 handed over",
        ("s1.r0", 1): "as attempt 0 failed: StorageBusy: for a minute",
        ("s1.r0", 2): "to take over from attempt 1",
    }
    run.beat("s1.r0", 1, attempt=2)
    assert watching.poll().successions[-1].reason == "as attempt 1 ended without a report"


def test_a_person_is_warned(run: SeenRun) -> None:
    plan = replace(run.record.plan, estimate=ESTIMATE)
    write_record(run.storage, run.keys, replace(run.record, plan=plan))
    halt_run(run.storage, run.keys, Halt(reason="it costs too much", step=9))
    run.beat("s0.r0", 2, memory_bytes=1000 << 20, step_s=3.0)
    run.beat("s1.r0", 2, step_s=3.0)
    assert watcher(run).poll().warnings == (
        "ends early: it costs too much",
        "s0.r0 has used 98% of its memory: train with --set training.on-oom=grow, or plan anew",
        "a step takes 3 s, 2.0 times what the plan expected",
    )


def test_the_run_is_dead_if_nobody_is_heard_of_and_a_look_waits_for_heartbeats_to_say_so(run: SeenRun) -> None:
    def gone(url: str) -> Platform:
        raise PlatformError(f"there is no platform {url}")

    clock = Clock()
    clock.now_s += 10_000
    began_s = clock.now_s
    view = Watcher(run.raw, "run-1", gone, clock=clock, pause=clock.pause).poll()
    assert clock.now_s >= began_s + 20
    assert view.status.verdict is Verdict.DEAD
    assert view.warnings[0].startswith("dead: no function sends heartbeats any more")
    assert (view.step_s, view.left_s, view.expected_usd) == (None, None, None)


def test_a_worker_that_wakes_while_a_look_waits_is_at_work(run: SeenRun) -> None:
    def gone(url: str) -> Platform:
        raise PlatformError(f"there is no platform {url}")

    clock = Clock()
    clock.now_s += 10_000

    def pause(seconds: float) -> None:
        clock.pause(seconds)
        run.beat("s0.r0", 2)
        run.beat("s1.r0", 2)

    view = Watcher(run.raw, "run-1", gone, clock=clock, pause=pause).poll()
    assert view.status.verdict is Verdict.RUNNING


def test_a_run_ends_as_status_says(run: SeenRun) -> None:
    for worker in ("s0.r0", "s1.r0"):
        run.end(worker, Outcome.HALTED)
    view = watcher(run).poll()
    assert (view.status.verdict, view.has_ended) == (Verdict.STOPPED, True)


def test_what_is_kept_of_a_finished_run_has_all_losses(run: SeenRun) -> None:
    losses = tuple(1.0 / (step + 1) for step in range(16))
    bill = Bill(platform="local", functions=2, function_seconds=9.0, puts=1, gets=1, compute_usd=0.25, request_usd=0.0)
    kept = FinishedRun(losses=losses, bill=bill, workers=(), elapsed_s=5.0, kept_bytes=9, skipped_steps=(3,))
    put_document(run.storage, run.keys.finished, kept)
    view = watcher(run).poll()
    assert (view.status.verdict, view.has_ended, view.done, view.skipped) == (Verdict.FINISHED, True, 16, 1)
    assert tuple(found.loss for found in view.losses) == losses
    assert view.expected_usd == 0.25


def test_a_run_that_is_gone_says_how_far_it_was_seen(run: SeenRun) -> None:
    watching = watcher(run)
    watching.poll()
    run.raw.delete_many(run.raw.list(""))
    with pytest.raises(RunUnknown, match="seen last after step 3 of 16"):
        watching.poll()
    with pytest.raises(RunUnknown, match="there is no run 'run-1'"):
        watcher(run).poll()


def test_a_resumed_run_is_seen_from_its_own_workers(run: SeenRun) -> None:
    watching = watcher(run)
    run.report(5, 1.0)
    assert watching.poll().beats == {"s0.r0": 1, "s1.r0": 1}
    again = SeenRun(run)
    again.start("s0.r0")
    again.start("s1.r0")
    again.beat("s0.r0", 1)
    view = watching.poll()
    assert (view.status.generation, view.beats, view.losses) == (1, {"s0.r0": 1}, ())


def requests(view: RunView) -> int:
    return view.asked.lists + view.asked.gets


def test_a_look_takes_twelve_requests_and_one_for_each_worker_and_replica(run: SeenRun) -> None:
    """As `funcpipe run watch --help` says."""
    watching = watcher(run)
    watching.poll()
    for attempt in (1, 2, 3):
        run.start("s0.r0", attempt)
    run.summarise([1.0, 1.0])
    run.report(7, 1.0)
    watching.poll()
    run.report(8, 1.0)
    for worker, attempt in (("s0.r0", 3), ("s1.r0", 0)):
        run.beat(worker, 2, attempt=attempt)
    view = watching.poll()
    assert requests(view) == 12 + len(view.status.workers) + run.record.plan.replicas
    assert 8 <= view.asked.lists <= 10
    assert (view.asked.puts, view.asked.empty_gets) == (0, 2)


def test_the_status_of_a_run_takes_eight_lists_and_four_gets_and_two_for_each_worker(run: SeenRun) -> None:
    """Its function and its heartbeat; each folder is listed once."""
    run.summarise([1.0, 1.0])
    run.report(2, 1.0)
    meter = RequestMeter()
    found = status(Counted(run.raw, meter), "run-1", run.platform.open, clock=Clock())
    assert found.verdict is Verdict.RUNNING
    asked = meter.counts
    assert (asked.lists, asked.gets, asked.puts) == (8, 8, 0)
