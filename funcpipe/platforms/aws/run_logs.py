"""Logs of a run in CloudWatch: its functions' lines, and Lambda's lines about them."""

import json
from collections.abc import Iterator
from typing import Any

from funcpipe.core.logs import RawLine
from funcpipe.platforms.shared.invocations import by_invocation

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
