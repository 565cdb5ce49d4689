"""What tests do around the Ray that they start: nothing of it lies in the user's folders, and nothing is left of it."""

import re
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import LONG_S

_TOKEN = "RAY_AUTH_TOKEN_PATH"
_SECRET = secrets.token_hex(32)  # the same for each Ray of this process, as Ray's library reads it once and keeps it
_RAY = re.compile(r"^ray::|/ray/")


@contextmanager
def environment_of_ray(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Within it Ray is started and ended; afterwards none of its processes is left, and signals do what they did.

    It finds its token in `folder`, or it would put one into the home folder; and it sends nothing to anybody.
    """
    token = folder / "token"
    token.write_text(_SECRET)
    with signals_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(_TOKEN, str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 by default: beside busy processes its functions would not start
        yield patch
    _, left = psutil.wait_procs(_processes_of(str(token)), timeout=LONG_S)
    assert left == []


@contextmanager
def signals_as_before() -> Iterator[None]:
    """Put back the handlers of signals, which Ray replaces in every process that starts it or connects to it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _processes_of(token: str) -> list[psutil.Process]:
    """Those of Ray that know of this token, whoever has started them.

    Others may have inherited it, such as a server of forks that another test of this process began meanwhile.
    """
    found = []
    for process in psutil.process_iter():
        try:
            of_ray = _RAY.search(" ".join(process.cmdline())) is not None
            if of_ray and process.environ().get(_TOKEN) == token:
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or is somebody else's
    return found
