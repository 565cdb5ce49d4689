"""Endings of asynchronous tasks of Function Compute, from their states and the messages of their errors."""

import re
from dataclasses import replace

from funcpipe.core import MB
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.shared.known_errors import KnownEnding

_AT_WORK = {"Enqueued", "Dequeued", "Running", "Retrying", "Stopping"}
_FULL = 0.95
"""The part of its memory that a killed process has used at least, as far as the service saw, if that was too little."""


_ENDINGS = (
    KnownEnding(
        r"Function time out after|Task timed out after",
        Cause.TIMED_OUT,
        "help.aliyun.com/zh/functioncompute/fc/function-time-out-after, 2026, and document_detail/52736.html, 2019",
    ),
    KnownEnding(
        r"(?i)\boom\b|out of memory|memory (usage )?(limit|exceeds)",
        Cause.OUT_OF_MEMORY,
        "an assumption: the service's pages name no text of its own for it, see the next one",
    ),
    KnownEnding(
        r"Process exited unexpectedly before completing request|Function instance exited unexpectedly",
        Cause.EXITED,
        "alibabacloud.com/help/en/functioncompute/fc-3-0/process-exited-unexpectedly-before-completing-request-message"
        ", 2025-01, where lack of memory is one of the causes; help.aliyun.com: errors of custom runtimes, 2026",
    ),
    KnownEnding(
        r"Function instance health check failed on port|FunctionNotStarted",
        Cause.CRASHED,
        "help.aliyun.com: errors of custom runtimes, 2026; alibabacloud.com/help/doc-detail/209867.htm, 2025-08",
    ),
)
_USED = re.compile(r"maxMemoryUsage: ([\d.]+) ?MB")
"""The service's addition to the message: github.com/aliyun/fc-go-sdk/issues/5, github.com/eggjs/egg/issues/4411."""

_KILLED = re.compile(r"exited unexpectedly\(code 137\b|signal: killed")
"""128 and the number of SIGKILL, as which Linux ends a process that takes too much memory."""


def status_of(state: str, message: str, memory_mb: int | None) -> Status:
    """Return the status of a function of that memory by its task's state and its error's message; None if not known.

    A process that ended without a word was killed for its memory if it had used all of it.
    """
    if state in _AT_WORK:
        return Status(state=State.RUNNING)
    if state == "Succeeded":
        return Status(state=State.DONE)
    ending = next((one for one in _ENDINGS if re.search(one.text, message)), None)
    failed = Status(
        state=State.FAILED,
        reason=f"{state.lower()}: {message or 'without a message'}",
        cause=Cause.CRASHED if ending is None else ending.cause,
    )
    used = _USED.search(message)
    used_mb = float(used[1]) if used is not None else 0.0
    is_full = memory_mb is not None and used_mb >= _FULL * memory_mb
    if failed.cause is Cause.EXITED and (is_full or _KILLED.search(message)):
        failed = replace(failed, cause=Cause.OUT_OF_MEMORY)
    if failed.cause is Cause.OUT_OF_MEMORY:
        return replace(failed, peak_bytes=int(used_mb * MB) or None)
    return failed
