"""Standard output and error: what is printed cannot command a terminal, and their readers may leave at any time."""

import contextlib
import io
import os
import sys
from typing import Any

from funcpipe.core.texts import printable, shortened

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
