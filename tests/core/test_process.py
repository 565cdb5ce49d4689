"""Signals to end: an interrupt where nothing else is to happen, and the program's own handlers afterwards."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from funcpipe.core.process import ENDING, ending_interrupts, handlers_kept


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Signals do what they do in a new program, and afterwards what they did before."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in ENDING]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_to_end_interrupts_like_ctrl_c(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), ending_interrupts(), ending_interrupts():
        os.kill(os.getpid(), number)
    assert handlers() == [signal.SIG_DFL] * len(ENDING)


def test_a_program_that_handles_or_ignores_signals_keeps_its_handlers() -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = handlers()
    with ending_interrupts():
        assert handlers() == own
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert received == [signal.SIGTERM]
    assert handlers() == own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with ending_interrupts():
        signal.signal(signal.SIGTERM, own[0])  # by the program, meanwhile
    assert handlers() == own


def test_other_threads_change_no_handlers() -> None:
    found: list[list[Any]] = []

    def look() -> None:
        with ending_interrupts(), handlers_kept():
            found.append(handlers())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30)
    assert found == [[signal.SIG_DFL] * len(ENDING)]


def test_what_a_library_makes_of_signals_ends_with_its_start() -> None:
    with ending_interrupts():
        before = handlers()
        with handlers_kept():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        assert handlers() == before
