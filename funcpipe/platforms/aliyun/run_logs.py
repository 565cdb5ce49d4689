"""Logs of a run in the log service: its functions' lines, by the instances that they ran in."""

import time
from collections.abc import Iterator, Mapping

from funcpipe.core.logs import BEGINS, RawLine
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.log_service import LogService
from funcpipe.platforms.aliyun.template import LOG_DAYS
from funcpipe.platforms.shared.invocations import by_invocation

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
