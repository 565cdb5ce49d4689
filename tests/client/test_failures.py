"""What is said of a failure: whose work is missing, what was waited for, what comes next."""

from dataclasses import replace

import pytest

from funcpipe.cli.commands import parse
from funcpipe.client.control.commands import after_failure, after_removal
from funcpipe.client.control.verdict import awaited_by, final_failure, first_failure, how_it_ended
from funcpipe.core import Busy, LeaseDocument, Outcome, WorkerReport
from funcpipe.core.settings import WHY_GONE
from funcpipe.platforms.base import Cause, Handle, State, Status
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from tests.run_documents import BEAT, REPORT

KEYS = Keys("run-1")
KEY = KEYS.message("s1.r0", 3, "put-gradient.s1.r0.m0.p0")
WAITED = replace(
    REPORT,
    outcome=Outcome.FAILED,
    started_at_s=900.0,
    ended_at_s=1000.0,
    task="get-gradient.s0.r0.m0.p1",
    error=f"DeadlineExceeded: {KEY} has not come within 300 s",
)


def fail(storage: MemoryStorage, report: WorkerReport) -> None:
    put_document(storage, KEYS.worker_report(report.worker, report.attempt), report)
    put_document(storage, KEYS.lease(report.worker, 0), LeaseDocument(holder="x"))
    put_document(storage, KEYS.lease(report.worker, 1), LeaseDocument(holder="x", ended=Outcome.FAILED))


def beat(storage: MemoryStorage, worker: str, *busy: Busy) -> None:
    put_document(storage, KEYS.heartbeat(worker, 0), replace(BEAT, worker=worker, busy=busy))


def test_the_worker_whose_work_is_missing_is_named_with_the_key_and_what_it_did_last(storage: MemoryStorage) -> None:
    fail(storage, WAITED)
    beat(storage, "s1.r0", Busy(lane="compute", task="backward.s1.r0.m0", since_s=290.0))
    said = str(first_failure(storage, KEYS))
    assert said.startswith(
        f"run run-1: the work of worker s1.r0 is missing: {KEY} has not come within 300 s; worker s0.r0 waited for it "
        "in task get-gradient.s0.r0.m0.p1. Worker s1.r0 sent its last heartbeat at "
    )
    assert said.endswith("after step 3 of 16, doing backward.s1.r0.m0 for 290.0 s")
    assert final_failure(storage, KEYS) == said.removeprefix("run run-1: ")


def test_who_waits_for_another_himself_is_not_to_blame(storage: MemoryStorage) -> None:
    fail(storage, WAITED)
    wait = Busy(lane="download", task="get-gradient.s1.r0.m0.p2", since_s=280.0, awaits="put-gradient.s2.r0.m0.p1")
    beat(storage, "s1.r0", wait)
    said = str(first_failure(storage, KEYS))
    assert "the work of worker s2.r0 is missing" in said
    assert said.endswith("Worker s2.r0 never sent a heartbeat")
    assert awaited_by(storage, KEYS, "s1.r0") == "worker s2.r0 never sent a heartbeat"
    assert awaited_by(storage, KEYS, "s2.r0") == ""


def test_a_worker_that_could_not_be_kept_alive_is_the_cause_of_others_waits(storage: MemoryStorage) -> None:
    fail(storage, WAITED)
    assert str(first_failure(storage, KEYS, "worker s1.r0 died 6 times")) == "run run-1: worker s1.r0 died 6 times"
    fail(storage, replace(WAITED, worker="s1.r0", task=None, error="ValueError: no", traceback="Traceback ..."))
    told = "run run-1: worker s1.r0 failed outside its tasks: ValueError: no\n\nTraceback ..."
    assert str(first_failure(storage, KEYS, "worker s1.r0 died 6 times")) == told


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (Status(state=State.FAILED, reason="ended with exit code 3", cause=Cause.EXITED), "ended with exit code 3 and"),
        (Status(state=State.DONE), "ended with exit code 0 and"),
    ],
)
def test_os_exit_is_called_that(status: Status, told: str) -> None:
    said = how_it_ended(Handle(worker="s0.r0", name="function 1"), status, None)
    assert said == f"(function 1) {told} without a report, as after os._exit() in your code or a library"


def test_a_function_that_lost_its_lease_did_not_exit_by_itself() -> None:
    said = how_it_ended(Handle(worker="s0.r0", name="function 1"), Status(state=State.DONE), None, taken_by=2)
    assert said == "(function 1) ended without a report, as attempt 2 had taken its lease"


def test_a_function_whose_lease_is_missing_is_not_said_to_have_exited() -> None:
    handle = Handle(worker="s0.r0", name="function 1")
    said = how_it_ended(handle, Status(state=State.DONE), None, leased=False)
    assert said.startswith(f"(function 1) ended without a report, and its lease is missing: {WHY_GONE}; or your code")
    exited = Status(state=State.FAILED, reason="ended with exit code 3", cause=Cause.EXITED)
    assert "as after os._exit()" in how_it_ended(handle, exited, None, leased=False)


def test_a_function_that_handed_over_did_not_end_without_a_report() -> None:
    handed_over = replace(WAITED, outcome=Outcome.HANDED_OVER, task=None, error=None)
    said = how_it_ended(Handle(worker="s1.r0", name="function 1"), Status(state=State.DONE), handed_over)
    assert said == "(function 1) has handed over, and its successor has ended or never begun"


def test_what_expires_is_said_to() -> None:
    assert after_failure("run-1", "s3://b/runs", expires=True)[:4] == after_failure("run-1", "s3://b/runs")
    *_, kept = after_failure("run-1", "s3://b/runs", expires=True)
    assert kept == "  it is kept: 7 days, unless the deployment was made with another platform.keep-days"


def test_the_next_commands_are_commands() -> None:
    url = "s3://bucket/runs?region=eu-central-1"
    told = [
        *after_failure("run-1", url),
        *after_removal("run-1", "local:///x"),
        *after_removal("run-1", "aws-lambda://f"),
    ]
    for line in told:
        _, _, command = line.partition(": ")
        words = [word.strip("'") for word in command.split()]
        if words[1] == "train":
            assert words[2] == "..."
            words[2:3] = ["m:f", "--plan", "plan.json", "--data", "m:g"]
        options = parse(words[1:])
        assert "run-1" in (
            getattr(options, "name", None),
            getattr(options, "resume", None),
            getattr(options, "about", None),
        )
        assert getattr(options, "storage", None) in (url, None)
