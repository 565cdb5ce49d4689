"""What is said after Ctrl-C."""

from funcpipe.cli.interrupts import what_happened
from funcpipe.errors import RunInterrupted


def interrupt(*, running: bool = False, kept: bool = False) -> RunInterrupted:
    return RunInterrupted("digits", running=running, kept=kept, storage="file:///runs")


def test_it_says_what_became_of_the_run() -> None:
    assert what_happened(KeyboardInterrupt()) == "interrupted"
    assert "run digits goes on without this command" in what_happened(interrupt(running=True))
    kept = what_happened(interrupt(kept=True))
    assert "what it saved is kept in file:///runs" in kept
    assert "funcpipe clean digits --storage file:///runs" in kept
    assert what_happened(interrupt()).endswith("its objects were deleted")


def test_a_second_interrupt_while_the_first_is_dealt_with_hides_nothing() -> None:
    second = KeyboardInterrupt()
    second.__context__ = interrupt(kept=True)
    assert "funcpipe clean digits" in what_happened(second)
