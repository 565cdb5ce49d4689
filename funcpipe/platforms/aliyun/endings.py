"""What Function Compute leaves of asynchronous tasks: states, messages of errors, and lines in the log service."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from funcpipe.core import MB
from funcpipe.core.logs import BEGINS, RawLine
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.resources import LOG_DAYS, LogService
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.shared.cloud import by_invocation
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


BEGIN = "FC Invoke Start RequestId: "
"""The line of a custom container at the begin of an invocation, by the service's documentation of its log format."""

_DAY_S = 86_400


def read_logs(account: Account, deployment: str, run: str) -> Iterator[RawLine]:
    """Yield the lines of all invocations in the instances that functions of `run` have begun in."""
    until_s = int(time.time()) + 60
    for project, store in _stores(account, deployment):
        service = LogService(account, project)
        began = service.search(store, f'"{run}" and "{BEGINS}"', since_s=until_s - LOG_DAYS * _DAY_S, until_s=until_s)
        instances: dict[str, int] = {}
        for entry in began:
            instances.setdefault(entry["instanceID"], int(entry["__time__"]))
        for instance, began_s in instances.items():
            found = service.search(store, f'instanceID: "{instance}"', since_s=began_s - _DAY_S, until_s=until_s)
            events = ((_moment_s(entry), entry.get("message", "").rstrip("\n")) for entry in found)
            yield from by_invocation(instance, events, lambda text: text.startswith(BEGIN))


def _stores(account: Account, deployment: str) -> set[tuple[str, str]]:
    """Return the projects and log stores of a deployment's functions: usually one."""
    configs = [function.log_config for function in account.deployed(deployment)]
    found = {(config.project, config.logstore) for config in configs if config and config.project}
    if not found:
        raise PlatformRefused(
            f"functions of {deployment} keep no logs, or there are none in {account.region}; deploy again, which makes "
            "a project of the log service for them"
        )
    return found


def _moment_s(entry: Mapping[str, str]) -> float:
    return int(entry["__time__"]) + int(entry.get("__time_ns_part__") or 0) / 1e9
