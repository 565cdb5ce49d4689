"""Keys that are pressed while a command waits, without Enter and without showing them."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator


class Left(Exception):
    """The user has pressed the key that leaves the command."""


@contextlib.contextmanager
def leaving_with(key: str, *, when: bool = True) -> Iterator[Callable[[float], None]]:
    """A pause of so many seconds that raises Left as soon as `key` is pressed; without a terminal, only a pause."""
    if not when or not sys.stdin.isatty():
        yield time.sleep
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin, termios.TCSANOW)  # what was typed already counts
    try:
        yield lambda seconds: _pause(seconds, key)
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _pause(seconds: float, key: str) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        stdin = sys.stdin.fileno()
        if select.select([stdin], [], [], left_s)[0]:
            pressed = os.read(stdin, 64)
            if not pressed or key.encode() in pressed:  # nothing: the terminal is gone
                raise Left
