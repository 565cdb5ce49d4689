"""Whose the processes of this machine are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from funcpipe.platforms.local.function import FUNCTION, HOST
from tests.support.processes import all_functions, all_hosts

_AS_HOST = f"""
import os
forked = os.fork()
open("/proc/self/comm", "w").write("{HOST}" if forked else "{FUNCTION}")
if forked:
    print(forked, flush=True)
os.read(0, 1)
"""
"""A host and a function of it, which is forked from it, until the standard input of both is closed."""


@contextmanager
def host(variable: str) -> Iterator[tuple[int, int]]:
    name, _, value = variable.partition("=")
    words = [sys.executable, "-S", "-c", _AS_HOST]
    with subprocess.Popen(
        words, env={**os.environ, name: value}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc")
def test_processes_are_told_apart_by_what_their_environment_began_with() -> None:
    with host("STUDY=one") as (own, function), host("STUDY=on") as (other, _):
        assert (all_hosts("STUDY=one"), all_functions("STUDY=one")) == ([own], [function])
        assert {own, other} <= set(all_hosts())
