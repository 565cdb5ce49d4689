"""A function's work, as every platform's entry does it: run the payload, and end early on request."""

import functools
import gc
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from abc import ABCMeta
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from funcpipe.core.backoff import Backoff
from funcpipe.core.start import Readiness, StartPart
from funcpipe.errors import InputError, KeyMissing, StorageError, WorkerFailed
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import Invoked, StartClock, Storage
from funcpipe.platforms.catalog import open_platform, open_storage

_log = logging.getLogger(__name__)

STOP_POLL_S = 5.0
"""Pause between two polls for a stop request: in 900 s 180 requests, 0.2 % of a 2 GB function's price."""

STOP_RETRIES = Backoff(first_s=STOP_POLL_S, most_s=30.0)
"""Longer pauses while the storage does not answer."""

STOPPED = 77
"""The exit code of a function that was asked to stop."""

_TORCH, _WORKER = "torch", "funcpipe.worker.attempt"

_STAT = Path("/proc/self/stat")
_START_TIME = 22 - 3  # of the fields after the process's name


class _OfClients(ABCMeta):
    """The class of what stands in, in an image, for what only clients have: it can be named, and not be used."""

    def __call__(cls, *_: object, **__: object) -> Any:
        raise InputError(cls.rule())

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(cls.rule())

    def rule(cls) -> str:
        """Return the error for its use."""
        place = next(
            f"{one.__module__}.{one.__name__}" for one in cls.__mro__ if one.__module__.startswith("funcpipe.")
        )
        return (
            f"{place} is for clients, functions do not have it: use it in what only your client calls, such as below "
            "`if __name__ == '__main__':`"
        )


class _LeftOut:
    """Finds modules of funcpipe that an image lacks: each name in them stands for something that raises when used.

    So modules of users that import `FuncPipe` at their top, and are installed in the image, load there.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Find a module of funcpipe: no other finder has."""
        return ModuleSpec(name, self, is_package=True) if name.startswith("funcpipe.") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make a usual one."""

    def exec_module(self, module: ModuleType) -> None:
        """Let it have any name."""

        def stand_in(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _OfClients(name, (), {"__module__": module.__name__})

        vars(module)["__getattr__"] = stand_in


if importlib.util.find_spec("funcpipe.client") is None:  # in an image: see `shared.package`
    sys.meta_path.append(_LeftOut())


class Environment:
    """The environment of a cloud's functions, one after the other; its platform bills its start with the first one."""

    def __init__(self, interpreter_s: float = 0.0) -> None:
        self._parts = {StartPart.INTERPRETER: interpreter_s} if interpreter_s else {}
        self._lock = threading.Lock()
        self._is_used = False

    def load(self) -> None:
        """Import what functions need, before the first of them is invoked."""
        for part, name in ((StartPart.TORCH, _TORCH), (StartPart.MODULES, _WORKER)):
            began_s = time.monotonic()
            importlib.import_module(name)
            with self._lock:
                self._parts[part] = time.monotonic() - began_s

    def load_within(self, seconds: float) -> None:
        """Begin to import what functions need; return once it is there, but not later than in so many seconds.

        The first function waits for the rest.
        """
        loading = threading.Thread(target=self.load, name="funcpipe-load", daemon=True)
        began_s = time.monotonic()
        loading.start()
        loading.join(seconds)
        with self._lock:
            if loading.is_alive():
                part = StartPart.MODULES if StartPart.TORCH in self._parts else StartPart.TORCH
                self._parts[part] = time.monotonic() - began_s - self._parts.get(StartPart.TORCH, 0.0)

    def invoked(self, *, at_s: float | None = None, lifetime_s: float | None = None) -> Invoked:
        """Return the invocation of the next function in this environment: it was invoked now, or `at_s`."""
        with self._lock:
            parts, self._parts = self._parts, {}
            is_used, self._is_used = self._is_used, True
        return Invoked(
            at_s=time.monotonic() if at_s is None else at_s,
            lifetime_s=lifetime_s,
            init_s=sum(parts.values()),
            start=StartClock(Readiness.REUSED if is_used else Readiness.COLD, parts),
        )


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not report it (Linux does, to a hundredth: proc(5))."""
    if not _STAT.exists():
        return 0.0
    began_ticks = int(_STAT.read_text().rpartition(")")[2].split()[_START_TIME])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")


def main(payload: str, invoked: Invoked | None = None) -> None:
    """Do what `payload`, the JSON text of an invocation, says; ends with exit code 1 when that failed.

    The function was `invoked` just now, unless that says otherwise.
    """
    if invoked is None:
        invoked = Invoked(start=StartClock(Readiness.IMPORTED if _TORCH in sys.modules else Readiness.COLD))
    with invoked.start.part(StartPart.MODULES):
        from funcpipe.worker import invocation

    there = functools.partial(open_storage, first_s=None)  # the client has put what this function reads
    invocation.main(payload, open_storage=there, open_platform=open_platform, invoked=invoked)


def load(payload: str) -> object:
    """Return what functions with this payload, and others of its stage, may find loaded (`Invoked.template`)."""
    from funcpipe.worker import invocation

    return invocation.load(payload, open_storage=functools.partial(open_storage, first_s=None))


def run(payload: str, invoked: Invoked) -> None:
    """Do what `payload`, the JSON text of an invocation, says; raises WorkerFailed when that failed.

    The function has then left its report in the storage.
    """
    try:
        main(payload, invoked)
    except SystemExit as end:
        if end.code:
            raise WorkerFailed(f"the worker ended with exit code {end.code}; its report is in the storage") from None


def free_memory() -> None:
    """Free what no object holds any more: an invocation is over, its environment awaits the next.

    The caller holds nothing of the invocation: a client of a cloud is a circle of objects of some 10 MB, which
    only the collector takes apart.
    """
    gc.collect()
    allocator.trim()


def stop_key(invocation: str) -> str:
    """Return the key of the object whose existence asks an invocation to stop."""
    return f"stops/{invocation}"


class StopWatch:
    """Ends the process when the object `stop_key(invocation)` appears in `storage`, for as long as the context lasts.

    Clouds that cannot end a running function are asked this way. While the storage fails, for whatever reason, it is
    asked again after longer and longer pauses.
    """

    def __init__(
        self,
        storage: Storage,
        invocation: str,
        *,
        poll_s: float = STOP_POLL_S,
        retries: Backoff = STOP_RETRIES,
        pause: Callable[[float], bool] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`pause` waits for some seconds, and returns True if the context has ended meanwhile."""
        self._storage = storage
        self._key = stop_key(invocation)
        self._poll_s = poll_s
        self._retries = retries
        self._end = end
        self._over = threading.Event()
        self._pause = pause or self._over.wait
        self._thread = threading.Thread(target=self._watch, name="funcpipe-stop", daemon=True)

    def __enter__(self) -> "StopWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def join(self) -> None:
        """Return when the watch has asked the process to end."""
        self._thread.join()

    def _watch(self) -> None:
        failures = 0
        while True:
            pause_s = self._poll_s
            try:
                self._storage.get(self._key)
            except KeyMissing:
                failures = 0
            except StorageError as error:
                failures += 1
                pause_s += self._retries.pause_s(failures)
                _log.warning("cannot ask whether this function is to stop, asks again in %.0f s: %s", pause_s, error)
            else:
                _log.warning("the client has asked this function to stop")
                self._end(STOPPED)
                return
            if self._pause(pause_s):
                return
