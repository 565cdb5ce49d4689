"""What is said after Ctrl-C."""

from funcpipe.cli import what_happened
from funcpipe.errors import RunInterrupted


def interrupt(*, running: bool = False, kept: bool = False, saved_step: int | None = None) -> RunInterrupted:
    return RunInterrupted(
        "digits", running=running, kept=kept, storage="file:///runs", saved_step=saved_step, steps=200
    )


def test_it_says_what_became_of_the_run() -> None:
    assert what_happened(KeyboardInterrupt()) == "interrupted"
    watched = what_happened(interrupt(running=True))
    assert watched.startswith(
        "interrupted; run digits: it goes on\n  watch it:   funcpipe run watch digits --storage file:///"
    )
    assert "\n  in Python:  pipe.train(dataset, ..., resume='digits', storage='file:///runs')\n" in watched
    kept = what_happened(interrupt(kept=True, saved_step=152))
    assert kept.splitlines() == [
        "interrupted; run digits: it was stopped, and step 152 of 200 is saved",
        "  resume it:  funcpipe train ... --resume digits --storage file:///runs",
        "  in Python:  pipe.train(dataset, ..., resume='digits', storage='file:///runs')",
        "  delete it:  funcpipe run clean digits --storage file:///runs",
    ]
    assert "it was stopped before a step was saved\n" in what_happened(interrupt(kept=True, saved_step=0))
    assert "it was stopped, and what it saved is kept\n" in what_happened(interrupt(kept=True))
    assert what_happened(interrupt()) == "interrupted; run digits: it was stopped and its objects were deleted"


def test_a_second_interrupt_while_the_first_is_dealt_with_hides_nothing() -> None:
    second = KeyboardInterrupt()
    second.__context__ = interrupt(kept=True)
    assert "funcpipe run clean digits" in what_happened(second)
