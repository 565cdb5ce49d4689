"""What is said of a run as a whole."""

import time
from dataclasses import replace

import pytest

from funcpipe.client.control.verdict import Verdict, judge
from funcpipe.core import Busy, Halt
from funcpipe.runstate.liveness import RunLiveness, WorkerLiveness, WorkerState
from tests.run_documents import BEAT, RECORD

NOON_S = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


def worker(
    name: str, state: WorkerState, *, step: int = 3, busy: tuple[Busy, ...] = (), reason: str = ""
) -> WorkerLiveness:
    beat = replace(BEAT, worker=name, step=step, sent_at_s=NOON_S, busy=busy)
    return WorkerLiveness(worker=name, state=state, beat=beat, reason=reason)


def verdict(*workers: WorkerLiveness, halt: Halt | None = None, failure: str | None = None) -> tuple[Verdict, str]:
    return judge(RECORD, RunLiveness(workers=workers), halt, failure, saved_step=2)


def waits(source: str, since_s: float) -> Busy:
    return Busy(lane="download", task="get", since_s=since_s, awaits=source)


COMPUTES = Busy(lane="compute", task="forward.s2.r0.m0", since_s=60.0)


def test_a_run_that_makes_steps_is_running() -> None:
    found = verdict(
        worker("s0.r0", WorkerState.WORKING, step=4),
        worker("s1.r0", WorkerState.WORKING, busy=(waits("put-activation.s0.r0.m0.k0", 0.1),)),
    )
    assert found == (Verdict.RUNNING, "step 3 of 16 is done")


def test_a_run_waits_for_the_worker_at_the_end_of_the_chain() -> None:
    found = verdict(
        worker("s0.r0", WorkerState.WORKING, busy=(waits("put-gradient.s1.r0.m0.p0", 50.0),)),
        worker("s1.r0", WorkerState.WORKING, busy=(waits("put-gradient.s2.r0.m0.p1", 40.0),)),
        worker("s2.r0", WorkerState.WORKING, busy=(COMPUTES,)),
    )
    assert found[0] is Verdict.WAITING
    assert found[1].startswith("for worker s2.r0 since ")
    assert found[1].endswith("11:59:10")


def test_workers_that_wait_for_each_other_end_the_chain() -> None:
    found = verdict(
        worker("s0.r0", WorkerState.WORKING, busy=(waits("put-gradient.s1.r0.m0.p0", 50.0),)),
        worker("s1.r0", WorkerState.WORKING, busy=(waits("put-activation.s0.r0.m0.k0", 40.0),)),
    )
    assert found[1].startswith("for worker s1.r0 since")


def test_a_worker_that_died_is_waited_for_while_others_can_start_it_again() -> None:
    found = verdict(worker("s0.r0", WorkerState.DEAD, reason="killed by SIGKILL"), worker("s1.r0", WorkerState.WORKING))
    assert found == (
        Verdict.WAITING,
        "for worker s0.r0, whose function has ended (killed by SIGKILL), which is to be started again; "
        "step 2 of 16 is saved",
    )


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ((WorkerState.DEAD, WorkerState.DEAD), "all functions have ended"),
        ((WorkerState.DEAD, WorkerState.FINISHED), "all functions have ended"),
        ((WorkerState.DEAD, WorkerState.SILENT), "no function sends heartbeats any more"),
    ],
)
def test_a_run_that_nobody_works_on_is_dead_and_says_what_is_saved(
    states: tuple[WorkerState, WorkerState], text: str
) -> None:
    found = verdict(*(worker(f"s{stage}.r0", state) for stage, state in enumerate(states)))
    assert found[0] is Verdict.DEAD
    assert found[0].exit_code == 3
    assert found[1].startswith(f"{text}, last heartbeat ")
    assert found[1].endswith("12:00:00, step 2 of 16 is saved")


def test_runs_that_have_ended_say_how() -> None:
    ended = worker("s0.r0", WorkerState.FINISHED)
    assert verdict(ended) == (Verdict.FINISHED, "all 16 steps are done")
    halted = worker("s1.r0", WorkerState.HALTED)
    assert verdict(ended, halted, halt=Halt(reason="it was stopped")) == (
        Verdict.STOPPED,
        "it was stopped; step 2 of 16 is saved",
    )
    failed = verdict(ended, failure="worker s1.r0 failed: ValueError: no")
    assert failed == (Verdict.FAILED, "worker s1.r0 failed: ValueError: no; step 2 of 16 is saved")
    assert [found.exit_code for found in Verdict] == [0, 0, 3, 0, 0, 1]
