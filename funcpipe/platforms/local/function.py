"""One local function: a process forked from its host, and how it ended."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from funcpipe.core.process import ENDING, ignore_ending_signals
from funcpipe.platforms.base import Cause, State, Status

SERVER, HOST, TEMPLATE, FUNCTION = "funcpipe-fork", "funcpipe-host", "funcpipe-tmpl", "funcpipe-func"
"""The names of processes, as `ps -o comm` shows them on Linux."""


def name_process(name: str) -> None:
    """Name this process, where the system can: at most 15 letters."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def fork(work: Callable[[], None], *, lifeline: int) -> int:
    """Start a process, in a group of its own, that does `work` and ends; its number.

    It ends with exit code 1 after an exception, and at once when all others that hold the pipe `lifeline` have ended.
    """
    pid = os.fork()
    if pid == 0:
        end_after(lambda: as_function(work, lifeline))
    with suppress(PermissionError, ProcessLookupError):  # the new process does it too: whichever is first
        os.setpgid(pid, pid)
    return pid


def kill(pid: int) -> None:
    """End a function, and the processes that it started."""
    with suppress(PermissionError, ProcessLookupError):  # the last of them has ended
        os.killpg(pid, signal.SIGKILL)


def status_of(exit_status: int) -> Status:
    """Return the status for an exit status of `os.waitpid`."""
    code = os.waitstatus_to_exitcode(exit_status)
    if code == 0:
        return Status(state=State.DONE)
    if code > 0:
        return Status(state=State.FAILED, reason=f"ended with exit code {code}", cause=Cause.EXITED)
    return Status(state=State.FAILED, reason=f"killed by {signal.Signals(-code).name}", cause=Cause.CRASHED)


def end_after(work: Callable[[], None]) -> NoReturn:
    """Do `work` in a process that was just forked, and end it: nothing may pass into the code of the parent.

    The exit code is 1 after an exception, whose traceback is printed.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # there may be no reader left
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def as_function(work: Callable[[], None], lifeline: int) -> None:
    """Do `work` in a process that was just forked, as a function in a group of its own."""
    with suppress(PermissionError):
        os.setpgid(0, 0)
    name_process(FUNCTION)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ignore_ending_signals()  # this function's host, which ends it with its whole group
    os.register_at_fork(after_in_child=_end_as_asked)
    threading.Thread(target=_end_with, args=(lifeline,), name="funcpipe-watch", daemon=True).start()
    work()


def _end_as_asked() -> None:
    """Processes that the user's code forks, such as those of multiprocessing, are ended by signals."""
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written to it
    kill(os.getpid())
