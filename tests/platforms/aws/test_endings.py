"""How Lambda's own words about an invocation's end are understood."""

import json
from typing import Any

import pytest

from funcpipe.platforms.aws.endings import of_failure, of_report
from funcpipe.platforms.base import Cause, State


def report(status: str, peak_mb: int = 100, **more: Any) -> str:
    metrics = {"durationMs": 900_000.0, "memorySizeMB": 1024, "maxMemoryUsedMB": peak_mb}
    return json.dumps(
        {"type": "platform.report", "record": {"requestId": "r", "status": status, "metrics": metrics, **more}}
    )


@pytest.mark.parametrize(
    ("message", "state", "cause", "words"),
    [
        (report("success"), State.DONE, None, ""),
        (report("timeout", 1024), State.FAILED, Cause.TIMED_OUT, "timed out after 900 s"),
        (report("timeout"), State.FAILED, Cause.TIMED_OUT, "timed out after 900 s"),
        (report("error", 1024, errorType="Runtime.ExitError"), State.FAILED, Cause.OUT_OF_MEMORY, "1024 of 1024 MB"),
        (report("error", 700, errorType="Runtime.OutOfMemory"), State.FAILED, Cause.OUT_OF_MEMORY, "700 of 1024 MB"),
        (report("error", errorType="Runtime.ExitError"), State.FAILED, Cause.EXITED, "Runtime.ExitError"),
        (report("failure", errorType="WorkerFailed"), State.FAILED, Cause.CRASHED, "WorkerFailed"),
        (report("failure"), State.FAILED, Cause.CRASHED, "failure"),
    ],
)
def test_a_report_tells_state_and_cause(message: str, state: State, cause: Cause | None, words: str) -> None:
    found = of_report(message)
    assert found is not None
    request, status = found
    assert (request, status.state, status.cause) == ("r", state, cause)
    assert words in status.reason
    assert (status.peak_bytes is not None) == (cause is Cause.OUT_OF_MEMORY)


@pytest.mark.parametrize("message", ["", "a line", "[1]", '"text"', "{}", '{"type": "platform.start", "record": {}}'])
def test_other_events_of_the_log_are_passed_over(message: str) -> None:
    assert of_report(message) is None


@pytest.mark.parametrize(
    ("condition", "answer", "cause", "words"),
    [
        ("EventAgeExceeded", None, Cause.CRASHED, "never started"),
        ("RetriesExhausted", {"errorMessage": "2026 r Task timed out after 3.00 seconds"}, Cause.TIMED_OUT, "3.00"),
        (
            "RetriesExhausted",
            {"errorType": "Runtime.ExitError", "errorMessage": "Runtime exited with error: signal: killed"},
            Cause.OUT_OF_MEMORY,
            "out of memory",
        ),
        ("RetriesExhausted", {"errorType": "Runtime.OutOfMemory"}, Cause.OUT_OF_MEMORY, "out of memory"),
        (
            "RetriesExhausted",
            {
                "errorType": "Sandbox.Timedout",
                "errorMessage": "RequestId: d88fc138 Error: Task timed out after 900.00 seconds",
            },
            Cause.TIMED_OUT,
            "timed out after 900.00 seconds",
        ),
        (
            "RetriesExhausted",
            {
                "errorType": "Runtime.ExitError",
                "errorMessage": "RequestId: d88fc138 Error: Runtime exited with error: signal: segmentation fault",
            },
            Cause.CRASHED,
            "segmentation fault",
        ),
        (
            "RetriesExhausted",
            {
                "errorType": "Runtime.ExitError",
                "errorMessage": "RequestId: d88fc138 Error: Runtime exited with error: exit status 137",
            },
            Cause.EXITED,
            "exit status 137",
        ),
        (
            "RetriesExhausted",
            {"errorType": "Runtime.ExitError", "errorMessage": "Runtime exited without providing a reason"},
            Cause.EXITED,
            "failed: Runtime exited without providing a reason",
        ),
        ("RetriesExhausted", {"errorType": "ValueError", "errorMessage": "no"}, Cause.CRASHED, "failed: no"),
        ("RetriesExhausted", None, Cause.CRASHED, "RetriesExhausted"),
    ],
)
def test_a_record_of_a_failure_tells_the_cause(condition: str, answer: object, cause: Cause, words: str) -> None:
    record = {"requestContext": {"requestId": "r", "condition": condition}, "responsePayload": answer}
    request, status = of_failure(json.dumps(record))
    assert (request, status.state, status.cause) == ("r", State.FAILED, cause)
    assert words in status.reason
