"""What Lambda writes to CloudWatch and of failures to a bucket, and what CloudWatch refuses, which moto does not.

After the documentation of functions that log in JSON to a log group of their own, and of FilterLogEvents.
"""

import contextlib
import json
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from tests.cloud_emulation.lambda_runtime import Environment, Invocation


def write_log(logs: Any, group: str, environment: Environment, invocation: Invocation, began_ms: int) -> None:
    """Write an invocation to its environment's stream: the platform's events, and between them what was printed."""
    printed = [(moment_ms, text) for moment_ms, text in environment.take_events() if text.strip()]
    before = [event for event in printed if event[0] < began_ms]
    ended_ms = int(time.time() * 1000)
    start = {"requestId": invocation.request_id, "version": environment.function.version}
    report = {
        "requestId": invocation.request_id,
        "status": invocation.status,
        "metrics": {
            "durationMs": float(ended_ms - began_ms),
            "billedDurationMs": float(ended_ms - began_ms),
            "memorySizeMB": environment.function.memory_mb,
            "maxMemoryUsedMB": invocation.peak_mb,
        },
    } | ({"errorType": invocation.error_type} if invocation.error_type else {})
    events = [
        *before,
        (began_ms, _platform_event(began_ms, "platform.start", start)),
        *printed[len(before) :],
        (ended_ms, _platform_event(ended_ms, "platform.report", report)),
    ]
    with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
        logs.create_log_stream(logGroupName=group, logStreamName=environment.stream)
    items = [{"timestamp": moment_ms, "message": text} for moment_ms, text in events]
    logs.put_log_events(logGroupName=group, logStreamName=environment.stream, logEvents=items)


def write_failure(
    objects: Any, bucket: str, name: str, invocation: Invocation, answer: bytes, condition: str = "RetriesExhausted"
) -> None:
    """Write Lambda's record of an event that has failed, or for which there was no room (`EventAgeExceeded`).

    It holds what the function was told (invocation-async-retain-records, 2025-12).
    """
    record = {
        "version": "1.0",
        "requestContext": {"requestId": invocation.request_id, "condition": condition},
        "requestPayload": json.loads(invocation.payload),
        "responsePayload": json.loads(answer),
    }
    moment = time.strftime("%Y/%m/%d/%Y-%m-%dT%H.%M.%S", time.gmtime())
    key = f"aws/lambda/async/{name}/{moment}-{uuid.uuid4()}"
    objects.put_object(Bucket=bucket, Key=key, Body=json.dumps(record).encode())


def check_filter(request: Mapping[str, Any]) -> None:
    """What FilterLogEvents refuses: too many streams, words with other signs than letters that are not quoted."""
    assert len(request.get("logStreamNames", ["one"])) in range(1, 101)
    pattern = request.get("filterPattern", "")
    quoted = re.fullmatch(r'"([^"\\]|\\.)+"', pattern)
    assert quoted or pattern.startswith("{") or re.fullmatch(r"[\w ]*", pattern), pattern


def _platform_event(moment_ms: int, kind: str, record: Mapping[str, Any]) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment_ms / 1000))
    return json.dumps({"time": f"{moment}.{moment_ms % 1000:03}Z", "type": kind, "record": record})
