"""This process: signals that ask it to end, its standard streams, and the user's folders."""

import contextlib
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcpipe.core.texts import printable, shortened
from funcpipe.errors import InputError

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


_LONGEST = 20_000
"""A message that quotes several texts of others loses its middle beyond twice as many characters."""


def prepare_streams() -> None:
    """Discard output to streams that were closed from the start, and print as much as a terminal or a file can show.

    A descriptor that is closed would become the next file that is opened, and be printed to. A terminal that lacks a
    character, such as an arrow, shows a question mark in its place.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process lasts
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def write_out(text: str = "", *, end: str = "\n") -> bool:
    """Print `text`, a result, to standard output at once; returns False if its reader is gone."""
    return _write(sys.stdout, text + end)


def say(text: str, *, end: str = "\n") -> None:
    """Print a message, which may quote what others have written, to standard error."""
    _write(sys.stderr, printable(shortened(text, kept=_LONGEST)) + end)


def end_output() -> None:
    """Make unread output no error as the process ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # of a full disk, the interpreter tells
            _write(stream, "")


def discard_output(stream: Any) -> None:
    """Discard later output to `stream`, whose reader, such as `head`, has read enough."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no descriptor, or is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(stream: Any, text: str) -> bool:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard_output(stream)
        return False
    return True


def state_folder() -> Path:
    """Return funcpipe's folder where the user's programs keep their state; raises OSError if the user has no home."""
    return _folder("XDG_STATE_HOME", "~/.local/state")


def data_folder() -> Path:
    """Return funcpipe's folder where the user's programs keep their data; raises OSError if the user has no home."""
    return _folder("XDG_DATA_HOME", "~/.local/share")


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder that lasts as long as a context. Raises InputError where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="funcpipe-")
    except OSError as error:
        raise InputError(f"no temporary folder can be made: {error}; set TMPDIR to one that can be written") from error


def _folder(variable: str, otherwise: str) -> Path:
    try:
        return Path(os.environ.get(variable) or otherwise).expanduser() / "funcpipe"
    except RuntimeError as error:  # this user number has no entry, as in many a container
        raise FileNotFoundError(f"this user has no home folder, and neither $HOME nor ${variable} names one") from error
