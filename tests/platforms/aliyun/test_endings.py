"""How Function Compute's own words about a task's end are understood."""

import pytest

from funcpipe.core import MB
from funcpipe.platforms.aliyun.endings import status_of
from funcpipe.platforms.base import Cause, State

_EXITED = "Process exited unexpectedly before completing request"


@pytest.mark.parametrize("state", ["Enqueued", "Dequeued", "Running", "Retrying", "Stopping"])
def test_a_task_that_has_not_ended_runs(state: str) -> None:
    assert status_of(state, "", 1024).state is State.RUNNING


def test_a_task_that_succeeded_is_done() -> None:
    assert status_of("Succeeded", "", 1024).state is State.DONE


@pytest.mark.parametrize(
    ("state", "message", "cause", "peak_mb"),
    [
        ("Failed", "Function time out after 3 seconds", Cause.TIMED_OUT, None),
        ("Failed", "Task timed out after 3 seconds", Cause.TIMED_OUT, None),
        ("Failed", f"{_EXITED} (duration: 9ms, maxMemoryUsage: 49.82MB)", Cause.EXITED, None),
        ("Failed", f"{_EXITED} (duration: 1760ms, maxMemoryUsage: 1020.50MB)", Cause.OUT_OF_MEMORY, 1020.5),
        ("Failed", _EXITED, Cause.EXITED, None),
        (
            "Failed",
            "Function instance exited unexpectedly(code 2, message:no such file or directory) with start command 'x'.",
            Cause.EXITED,
            None,
        ),
        ("Failed", "Function instance exited unexpectedly(code 137, message:) with", Cause.OUT_OF_MEMORY, None),
        ("Failed", "Function instance health check failed on port 9000 in 120 seconds.", Cause.CRASHED, None),
        ("Failed", "UnhandledInvocationError: no", Cause.CRASHED, None),
        ("Failed", "WorkerFailed: there is no room for the timeout", Cause.CRASHED, None),
        ("Stopped", "", Cause.CRASHED, None),
        ("Expired", "", Cause.CRASHED, None),
    ],
)
def test_a_task_that_failed_tells_the_cause(state: str, message: str, cause: Cause, peak_mb: float | None) -> None:
    status = status_of(state, message, 1024)
    assert (status.state, status.cause) == (State.FAILED, cause)
    assert status.peak_bytes == (None if peak_mb is None else int(peak_mb * MB))
    assert state.lower() in status.reason


def test_a_process_of_unknown_memory_has_exited() -> None:
    assert status_of("Failed", f"{_EXITED} (duration: 9ms, maxMemoryUsage: 1020.50MB)", None).cause is Cause.EXITED
