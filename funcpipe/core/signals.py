"""Signals that ask a process to end, as containers, Slurm and systemd send them; handlers that libraries replace."""

import contextlib
import signal
import threading
from collections.abc import Iterator

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt within this context, as Ctrl-C does, when a signal asks this process to end.

    Only in the main thread, which alone can handle signals, and unless the program handles or ignores them itself.
    """
    replaced = []
    if _handles_signals():
        replaced = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in replaced:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number in replaced:
            if signal.getsignal(number) is signal.default_int_handler:
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of signals afterwards, whatever a library does meanwhile."""
    numbers = (signal.SIGINT, *ENDING) if _handles_signals() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _handles_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


def ignore_ending_signals() -> None:
    """Let the process manager end this process, where all processes of a job are asked to end at once.

    What this process starts by executing a program can be ended by signals, as ever.
    """
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, _nothing)


def _nothing(number: int, frame: object) -> None:
    """Do nothing; unlike SIG_IGN, a program that is executed does not inherit it."""
