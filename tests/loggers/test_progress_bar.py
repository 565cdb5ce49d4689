"""The progress of a run for people: a bar on terminals, sparse lines elsewhere."""

import io
import logging

import pytest
from rich.console import Console

from funcpipe.loggers import ProgressBar, with_bar
from tests.loggers import runs


def test_a_terminal_shows_the_run_and_a_bar_that_ends_full() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    assert runs.log(ProgressBar(console), runs.info(), (1, 2, 3, 4, 5, 6)) == ()
    text = written.getvalue()
    assert "digits: 6 of 6 steps, with no estimate in the plan" in text
    assert "6/6" in text
    assert "loss 0.1667  8 samples/s  $0.060000  val_loss 0.2500" not in text.splitlines()[0]


def test_without_a_terminal_nothing_is_written_and_lines_are_logged_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written, now_s = io.StringIO(), iter([0.0, 1.0, 40.0, 40.0, 41.0, 42.0, 43.0, 43.0])
    bar = ProgressBar(Console(file=written, force_terminal=False), clock=lambda: next(now_s, 43.0))
    with caplog.at_level(logging.INFO, logger="funcpipe.loggers"):
        assert runs.log(bar, runs.info(), (1, 2, 3, 4, 5, 6)) == ()
    assert written.getvalue() == ""
    told = [record.message.partition(":")[0] for record in caplog.records]
    assert told == ["digits", "step 2 of 6", "step 6 of 6"]


def test_one_bar_is_enough() -> None:
    assert [type(callback) for callback in with_bar((), True)] == [ProgressBar]
    own = ProgressBar(Console(file=io.StringIO()))
    assert with_bar([own], True) == [own]
    assert with_bar((), False) == []
