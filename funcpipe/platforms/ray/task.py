"""The function that a task of Ray runs, in a process that Ray may use again: ordered output, limited memory."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from funcpipe.core.start import Readiness
from funcpipe.platforms.base import Invoked, StartClock
from funcpipe.platforms.process import PeakMemory
from funcpipe.platforms.ray.library import ray

_ENTRY = "funcpipe.platforms.entry"


def run_function(host: str, namespace: str, name: str, payload: str, memory_bytes: int | None) -> None:
    """Do what `payload` says; raises WorkerFailed when that failed. The host in `namespace` knows it by `name`.

    With more than `memory_bytes` the process ends, after a report to the host.
    """
    readiness = Readiness.REUSED if "torch" in sys.modules else Readiness.COLD
    entry = importlib.import_module(_ENTRY)

    def report(peak_bytes: int) -> None:
        ray.get(ray.get_actor(host, namespace).used_too_much.remote(name, peak_bytes))

    invoked = Invoked(start=StartClock(readiness))
    with printed_in_order(), MemoryWatch(invoked.memory, memory_bytes, report):
        entry.run(payload, invoked)
    entry.free_memory()


_POLL_S = 0.2
OUT_OF_MEMORY = 78
"""The exit code of a function that used more memory than its size has."""


@contextmanager
def printed_in_order() -> Iterator[None]:
    """Print to where lines are logged, so that the run of a line is known."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class MemoryWatch:
    """Ends the process when it has used more than `memory_bytes`, after reporting how much it was.

    Ray's own `memory` only places tasks, and a limit of the address space would count what threads never touch.
    """

    def __init__(
        self,
        memory: PeakMemory,
        memory_bytes: int | None,
        report: Callable[[int], None],
        *,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Watch nothing if `memory_bytes` is None."""
        self._memory = memory
        self._memory_bytes = memory_bytes
        self._report = report
        self._end = end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="funcpipe-memory", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        if self._memory_bytes is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._memory_bytes is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._memory_bytes is not None, "there is no thread without a limit"
        while not self._over.wait(_POLL_S):
            peak_bytes = self._memory.peak_bytes()
            if peak_bytes > self._memory_bytes:
                try:
                    self._report(peak_bytes)
                finally:
                    self._end(OUT_OF_MEMORY)
                return
