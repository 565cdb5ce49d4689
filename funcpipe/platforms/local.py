"""Functions as processes of this machine, forked in a fraction of a second from a server that has torch loaded."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from funcpipe.core import PlatformSpec, WorkerSpec, to_text
from funcpipe.platforms.base import Cause, Handle, State, Status


class LocalPlatform:
    """Starts a process for every function; `entry` gets the invocation payload, as JSON text, and nothing else.

    The server from which processes are forked imports the modules `preload` once. Processes end with this one.
    """

    def __init__(self, spec: PlatformSpec, entry: Callable[[str], None], *, preload: Sequence[str] = ()) -> None:
        self.spec = spec
        self._entry = entry
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._processes: dict[Handle, BaseProcess] = {}

    def invoke(self, worker: WorkerSpec) -> Handle:
        """Start a function and return at once."""
        process = self._context.Process(
            target=_run_function, args=(self._entry, to_text(worker)), name=f"{worker.run} {worker.worker}", daemon=True
        )
        with _main_module_hidden():
            process.start()
        handle = Handle(worker=worker.worker, name=f"process {process.pid}")
        self._processes[handle] = process
        return handle

    def status(self, handle: Handle) -> Status:
        """How the function fares; a process that was killed is named with its signal."""
        code = self._processes[handle].exitcode
        if code is None:
            return Status(state=State.RUNNING)
        if code == 0:
            return Status(state=State.DONE)
        if code < 0:
            return Status(state=State.FAILED, reason=f"killed by {signal.Signals(-code).name}", cause=Cause.CRASHED)
        return Status(state=State.FAILED, reason=f"ended with exit code {code}", cause=Cause.CRASHED)

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended."""
        process = self._processes[handle]
        process.kill()
        process.join()


def _run_function(entry: Callable[[str], None], payload: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the client's business: it stops its functions
    threading.Thread(target=_end_with_client, name="funcpipe-watch", daemon=True).start()
    entry(payload)


def _end_with_client() -> None:
    """Kill this process when its client ends; the server it was forked from lives on as long as it does."""
    client = multiprocessing.parent_process()
    assert client is not None, "functions run in processes that a client started"
    connection.wait([client.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in every function."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
