"""What Lambda leaves of invocations: report events in logs, records of failures in the bucket, and printed lines."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from funcpipe.core import MB
from funcpipe.core.logs import RawLine
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.shared.cloud import by_invocation
from funcpipe.platforms.shared.known_errors import KnownEnding

_ENDINGS = (
    KnownEnding(
        r"^Runtime\.OutOfMemory$",
        Cause.OUT_OF_MEMORY,
        "github.com/DataDog/datadog-lambda-extension/pull/776, 2025-08: what functions in Python end with; "
        "github.com/nasa-gcn/gcn.nasa.gov/pull/3628, 2026-06",
    ),
    KnownEnding(
        r"Runtime exited with error: signal: killed", Cause.OUT_OF_MEMORY, "github.com/DataBiosphere/azul/issues/3485"
    ),
    KnownEnding(
        r"^Sandbox\.Timedout$|Task timed out after [\d.]+ seconds",
        Cause.TIMED_OUT,
        "docs.aws.amazon.com/lambda/latest/dg/configuration-timeout.html and troubleshooting-invocation.html, 2026-11",
    ),
    KnownEnding(
        r"Runtime exited with error: signal: ",
        Cause.CRASHED,
        "docs.aws.amazon.com/lambda/latest/dg/troubleshooting-invocation.html, 2026-11, for signals but that of memory",
    ),
    KnownEnding(
        r"^Runtime\.ExitError$|Runtime exited without providing a reason",
        Cause.EXITED,
        "github.com/aws/aws-lambda-dotnet/issues/480, 2019-06; "
        "docs.aws.amazon.com/lambda/latest/dg/troubleshooting-invocation.html, 2026-11",
    ),
)


def of_report(message: str) -> tuple[str, Status] | None:
    """Return the invocation that a log event reports, and its status; None for events of other kinds.

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
        case "error" if full or _cause(kind) is Cause.OUT_OF_MEMORY:
            text = f"out of memory: {peak_mb} of {size_mb} MB used"
            return replace(_failed(text, Cause.OUT_OF_MEMORY), peak_bytes=peak_mb * MB or None)
        case status:
            return _failed(f"ended with {kind or status}, {peak_mb} of {size_mb} MB used", _cause(kind))


def of_failure(text: str) -> tuple[str, Status]:
    """Return the invocation that Lambda's record of a failure is about, and its status."""
    record = json.loads(text)
    about, answer = record["requestContext"], record.get("responsePayload") or {}
    message = str(answer.get("errorMessage", ""))
    if about["condition"] == "EventAgeExceeded":
        reason = "was never started: Lambda had no room for it; the account's concurrency is used up"
        return about["requestId"], _failed(reason, Cause.CRASHED)
    cause = _cause(str(answer.get("errorType", "")), message)
    said = "out of memory" if cause is Cause.OUT_OF_MEMORY else "failed"
    return about["requestId"], _failed(f"{said}: {message or about['condition']}", cause)


def _cause(kind: str, message: str = "") -> Cause:
    """Return the cause of a function's end, by the type and the message of its error."""
    found = (one.cause for one in _ENDINGS for text in (kind, message) if re.search(one.text, text))
    return next(found, Cause.CRASHED)


def _failed(reason: str, cause: Cause) -> Status:
    return Status(state=State.FAILED, reason=reason, cause=cause)


_STREAMS_AT_ONCE = 100  # FilterLogEvents takes no more names
_BEFORE_MS = 15 * 60 * 1000  # a function may have printed all the time before it first logs


def read_logs(logs: Any, group: str, run: str) -> Iterator[RawLine]:
    """Yield the lines of all invocations in the streams that functions of `run` have logged to.

    `logs` is CloudWatch's client. A stream is an environment's, which Lambda may use for several invocations, one after
    the other.
    """
    began_ms: dict[str, int] = {}
    for event in _events(logs, group, filterPattern=json.dumps(f"run={run} worker=")):
        name = event["logStreamName"]
        began_ms[name] = min(event["timestamp"], began_ms.get(name, event["timestamp"]))
    names = list(began_ms)
    for first in range(0, len(names), _STREAMS_AT_ONCE):
        some = names[first : first + _STREAMS_AT_ONCE]
        found: dict[str, list[tuple[float, str]]] = {name: [] for name in some}
        since_ms = min(began_ms[name] for name in some) - _BEFORE_MS
        for event in _events(logs, group, logStreamNames=some, startTime=since_ms):
            found[event["logStreamName"]].append((event["timestamp"] / 1000, event["message"]))
        for name, events in found.items():
            yield from by_invocation(name, events, _begins)


def _events(logs: Any, group: str, **wanted: object) -> Iterator[dict[str, Any]]:
    pages = logs.get_paginator("filter_log_events").paginate(logGroupName=group, **wanted)
    return (event for page in pages for event in page["events"])


def _begins(text: str) -> bool:
    """Return True if Lambda reports the begin of an invocation (platform.start in its reference of log events)."""
    if '"platform.start"' not in text:
        return False
    try:
        event = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(event, dict) and event.get("type") == "platform.start"
