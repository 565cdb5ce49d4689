"""The processes of this machine, as tests and experiments look for what a run has started or left."""

import os
from pathlib import Path

from funcpipe.platforms.local.function import HOST, TEMPLATE


def children(parent: int) -> list[int]:
    """The processes that `parent` started and that run, oldest first."""
    return sorted(pid for pid in running() if _field(pid, "PPid") == str(parent))


def functions_of(client: int) -> list[int]:
    """The functions that the hosts of `client` run, in the order in which they were started."""
    return [function for host in hosts_of(client) for function in _functions(host)]


def hosts_of(client: int) -> list[int]:
    """The hosts of local functions that `client` has started."""
    return [pid for server in children(client) for pid in children(server) if _is_host(pid)]


def all_hosts(variable: str = "") -> list[int]:
    """The hosts of local functions, of detached runs too; with `variable`, NAME=VALUE, those that began with it."""
    return [pid for pid in running() if _is_host(pid) and (not variable or _began_with(pid, variable))]


def all_functions(variable: str = "") -> list[int]:
    """The functions that all these hosts run."""
    return [function for host in all_hosts(variable) for function in _functions(host)]


def _functions(host: int) -> list[int]:
    return [pid for pid in children(host) if _name(pid) != TEMPLATE]


def runs(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    return _field(pid, "State")[:1] not in ("", "Z", "X")


def running() -> list[int]:
    """All processes that have not ended."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and runs(int(name))]


def _began_with(pid: int, variable: str) -> bool:
    """Whether the program that the process is, or was forked from, began with a variable of its environment."""
    return variable.encode() in _read(pid, "environ").split(b"\0")


def _is_host(pid: int) -> bool:
    return _name(pid) == HOST


def _name(pid: int) -> str:
    return _read(pid, "comm").decode().strip()


def _field(pid: int, name: str) -> str:
    lines = _read(pid, "status").decode().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:")), "")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
