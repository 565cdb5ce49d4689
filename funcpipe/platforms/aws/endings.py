"""How invocations ended, from what Lambda leaves: report events in the logs, records of failures in the bucket."""

import json
import re
from dataclasses import replace
from typing import Any

from funcpipe.core import MB
from funcpipe.platforms.base import Cause, State, Status

_OUT_OF_MEMORY = "Runtime.OutOfMemory"
_EXITED = "Runtime.ExitError"
_KILLED = re.compile(r"signal: killed", re.IGNORECASE)
_TIMED_OUT = re.compile(r"Task timed out after [\d.]+ seconds")


def of_report(message: str) -> tuple[str, Status] | None:
    """The invocation that a log event reports, and how it ended; None for events of other kinds.

    In JSON, the report of Lambda has a `status`, and an `errorType` where the runtime did not end well.
    """
    try:
        event = json.loads(message)
    except json.JSONDecodeError:
        return None
    if not isinstance(event, dict) or event.get("type") != "platform.report":
        return None
    record = event["record"]
    return record["requestId"], _of_record(record)


def _of_record(record: dict[str, Any]) -> Status:
    kind, metrics = record.get("errorType", ""), record.get("metrics", {})
    size_mb, peak_mb = metrics.get("memorySizeMB", 0), metrics.get("maxMemoryUsedMB", 0)
    full = bool(size_mb) and peak_mb >= size_mb
    match record["status"]:
        case "success":
            return Status(state=State.DONE)
        case "timeout":
            return _failed(f"timed out after {metrics.get('durationMs', 0) / 1000:.0f} s", Cause.TIMED_OUT)
        case "error" if kind == _OUT_OF_MEMORY or full:
            text = f"out of memory: {peak_mb} of {size_mb} MB used"
            return replace(_failed(text, Cause.OUT_OF_MEMORY), peak_bytes=peak_mb * MB or None)
        case status:
            cause = Cause.EXITED if kind == _EXITED else Cause.CRASHED
            return _failed(f"ended with {kind or status}, {peak_mb} of {size_mb} MB used", cause)


def of_failure(text: str) -> tuple[str, Status]:
    """The invocation that Lambda's record of a failure is about, and what happened to it."""
    record = json.loads(text)
    about, answer = record["requestContext"], record.get("responsePayload") or {}
    message = str(answer.get("errorMessage", ""))
    if about["condition"] == "EventAgeExceeded":
        reason = "was never started: Lambda had no room for it; the account's concurrency is used up"
        return about["requestId"], _failed(reason, Cause.CRASHED)
    if _TIMED_OUT.search(message):
        return about["requestId"], _failed(message, Cause.TIMED_OUT)
    if answer.get("errorType") == _OUT_OF_MEMORY or _KILLED.search(message):
        return about["requestId"], _failed(f"out of memory: {message}", Cause.OUT_OF_MEMORY)
    cause = Cause.EXITED if answer.get("errorType") == _EXITED else Cause.CRASHED
    return about["requestId"], _failed(f"failed: {message or about['condition']}", cause)


def _failed(reason: str, cause: Cause) -> Status:
    return Status(state=State.FAILED, reason=reason, cause=cause)
