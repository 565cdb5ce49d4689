"""What happens to the functions of a run that are real processes, and to its storage: moments are drawn by seed."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from funcpipe.platforms.base import Storage
from funcpipe.testing.faults import Fault
from tests.support.processes import all_functions, running

LASTS_S = 4.0
"""About so long does a run last once its functions are started; faults strike within."""

MARK = "FUNCPIPE_STUDY"
"""The environment variable that tells the processes of a study from all others of this machine."""

_WRITTEN = {Fault.SAVING: "/checkpoints/", Fault.HANDING: "/hand-overs/"}
_LOOK_S = 0.005


def mark() -> str:
    """What the environment of this study's processes holds."""
    return f"{MARK}={os.environ[MARK]}"


class Striker:
    """Hits a run with one fault: one or two of its functions, or its storage at `url`.

    A function sleeps for `asleep_s`; the storage cannot be reached for half of that.
    """

    def __init__(self, fault: Fault, draw: random.Random, url: str, storage: Storage, *, asleep_s: float) -> None:
        self._fault = fault
        self._draw = draw
        self._url = url
        self._storage = storage
        self._asleep_s = asleep_s
        self._ended = threading.Event()

    @contextlib.contextmanager
    def striking(self, workers: int) -> Iterator[None]:
        """Strike once, at any moment after `workers` functions run, unless the block ends first."""
        thread = threading.Thread(target=self.strike, args=(workers,))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def strike(self, workers: int) -> None:
        """Wait for the moment, and strike."""
        if not self._come(lambda: len(all_functions(mark())) >= workers, 0.05):
            return
        if self._fault in _WRITTEN:
            count = self._draw.randrange(1, workers + 1)
            if not self._come(lambda: self._written(_WRITTEN[self._fault]) >= count, _LOOK_S):
                return
        elif self._ended.wait(self._draw.uniform(0, LASTS_S)):
            return
        if self._fault is Fault.OUTAGE:
            with _unreachable(self._url):
                time.sleep(self._asleep_s / 2)
            return
        victims = all_functions(mark())
        hit = self._draw.sample(victims, min(self._draw.choice((1, 2)), len(victims)))
        if self._fault not in (Fault.SLEEP, Fault.ZOMBIE):
            _signal(hit, signal.SIGKILL)
            return
        _signal(hit, signal.SIGSTOP)
        time.sleep(self._asleep_s)
        _signal(hit, signal.SIGCONT)

    def _come(self, is_time: Callable[[], bool], pause_s: float) -> bool:
        while not is_time():
            if self._ended.wait(pause_s):
                return False
        return True

    def _written(self, part: str) -> int:
        return sum(part in key for key in self._storage.list(""))


def is_mountable() -> bool:
    """Whether this user may mount a disk, which then fails on purpose."""
    return os.geteuid() == 0


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """A disk of its own, in memory, under `folder`."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def _unreachable(url: str) -> Iterator[None]:
    """Files are on a read-only disk, which must be their own; S3's gateway on this machine stands still."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        remount(parts.path, "ro")
        try:
            yield
        finally:
            remount(parts.path, "rw")
        return
    gateways = [pid for pid in running() if "radosgw" in Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")]
    if not gateways:
        raise SystemExit("no S3 gateway runs on this machine that could stand still")
    _signal(gateways, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(gateways, signal.SIGCONT)


def remount(folder: str, how: str) -> None:
    """Make the disk under `folder` read-only or writable; while a file is being written, it cannot be read-only."""
    until_s = time.monotonic() + 10
    while subprocess.run(["mount", "-o", f"remount,{how}", folder], capture_output=True, check=False).returncode:
        if time.monotonic() > until_s:
            raise SystemExit(f"the disk under {folder} cannot be made {how}")
        time.sleep(_LOOK_S)


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(process, number)
