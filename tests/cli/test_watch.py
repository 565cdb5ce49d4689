"""`funcpipe run watch`: as a screen, as lines, as JSON; left with a key, and ended as `status` ends."""

import io
import json
import math
import os
import pty
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from funcpipe.cli import main
from funcpipe.cli.watch import Left, leaving_with
from funcpipe.client.control.status import RunStatus, WorkerStatus
from funcpipe.client.control.verdict import Verdict
from funcpipe.client.control.watching import RunView, StepLoss, Succession
from funcpipe.core import Busy, Outcome, RequestCounts, ValidationReport
from funcpipe.runstate.liveness import WorkerState
from funcpipe.show.watch import PollLog, screen, sparkline
from funcpipe.testing.memory_storage import MemoryStorage
from tests.client.seen_run import NOW_S, SeenRun

BUSY = (
    Busy(lane="download", task="get-gradient.s1.r0.m3.p1", since_s=0.4, awaits="put-gradient.s2.r0.m3.p0"),
    Busy(lane="compute", task="backward.s1.r0.m1", since_s=0.2),
)


def worker(name: str, **changes: Any) -> WorkerStatus:
    plain = WorkerStatus(
        worker=name,
        state=WorkerState.WORKING,
        attempt=0,
        outcome=None,
        step=41,
        saved_step=40,
        memory_bytes=300 << 20,
        memory_mb=1024,
        spent_usd=0.1,
        heard_s=2.0,
        busy=(),
        error=None,
    )
    return replace(plain, **changes)


def view(*workers: WorkerStatus, **changes: Any) -> RunView:
    status = RunStatus(
        run="run-1",
        generation=0,
        steps=96,
        run_usd=0.00123,
        run_s=60.0,
        halt=None,
        verdict=Verdict.RUNNING,
        explanation="step 41 of 96 is done",
        saved_step=40,
        workers=workers or (worker("s0.r0"), worker("s1.r0", busy=BUSY)),
        validation=ValidationReport(step=32, samples=9, values={"val_loss": 0.5}, best_step=32, best_value=0.5),
    )
    plain = RunView(
        looked_at_s=NOW_S,
        platform="local:///tmp/x",
        status=status,
        done=43,
        losses=tuple(StepLoss(step=step, loss=1 / (1 + step)) for step in range(43)),
        first_loss=StepLoss(step=0, loss=1.0),
        step_s=0.5,
        left_s=26.5,
        expected_usd=0.00289,
        planned_s=0.48,
        planned_usd=0.0027,
        beats={"s0.r0": 9, "s1.r0": 9},
        lane_shares={"s0.r0": {"compute": 0.67}, "s1.r0": {"compute": 1.0, "upload": 0.11}},
        successions=(Succession(worker="s1.r0", attempt=1, started_at_s=NOW_S, reason="after attempt 0 handed over"),),
        warnings=("a step takes 0.5 s, 2.1 times what the plan expected",),
        asked=RequestCounts(lists=10, gets=5, empty_gets=2),
    )
    return replace(plain, **changes)


def drawn(seen: RunView, *, width: int = 80, height: int = 24, **options: Any) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False
    )
    console.print(screen(seen, console, **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_screen_shows_the_run_its_workers_and_what_is_wrong() -> None:
    lines = drawn(view(), every_s=5.0)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert lines[0] == "run run-1  running: step 41 of 96 is done"
    assert "2.00 steps/s, 26 s left" in lines[1]
    assert re.search(r"loss 0\.0233  █[▁▂▃▄▅▆▇]+▁  1\.0000 in step 1, lowest 0\.0233", text)
    assert "validated after step 32: val_loss 0.5000; best after step 32" in text
    assert "$0.0012 of about $0.0029, 60 s so far; step 40 is saved" in text
    assert "the plan expected 0.48 s a step, $0.0027 for all" in text
    assert "s1.r0      0     41    300 of 1024 100%  11%   0%  backward m1, waits for s2.r0" in lines
    assert "  ! a step takes 0.5 s, 2.1 times what the plan expected" in lines
    assert lines[-1].startswith("q leaves the run as it is; looked at ")
    assert lines[-1].endswith(" with 15 requests, again in 5 s")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 22), (120, 30)])
def test_a_screen_fits_the_terminal_and_shows_first_who_is_in_trouble(width: int, height: int) -> None:
    many = [worker(f"s{i}.r0") for i in range(40)]
    lost = worker("s40.r0", state=WorkerState.SILENT)
    lines = drawn(view(*many, lost), width=width, height=height, every_s=5.0)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("s40.r0") for line in lines)
    assert any(line.startswith("… and ") for line in lines)
    assert len(drawn(view(*many, lost), all_rows=True)) > 41


def test_without_a_terminal_each_look_is_a_line_and_news_are_told_once() -> None:
    lines = PollLog()
    first = lines.of(view())
    assert first[0].endswith("running: step 43 of 96, loss 0.0233, 2.00 steps/s, 26 s left, $0.0012 of about $0.0029")
    assert [line.strip() for line in first[1:]] == [
        f"{first[0].partition(' ')[0]} s1.r0 attempt 1, after attempt 0 handed over",
        "! a step takes 0.5 s, 2.1 times what the plan expected",
    ]
    later = view(warnings=("a step takes 0.6 s, 2.5 times what the plan expected", "s0.r0 is silent"))
    assert lines.of(later)[1:] == ["  ! s0.r0 is silent"]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.integers(1, 40))
def test_a_sparkline_is_as_long_as_it_may_be(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_sparkline_rises_and_falls_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([2, 2, 2], 3) == "▁▁▁"
    assert sparkline([0, math.nan, 7], 3) == "▁ █"
    assert sparkline([-1.7e308, 1.7e308], 2) == "▁█"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> SeenRun:
    """A run with two workers, which the command finds wherever it looks."""
    run = SeenRun()
    for name in ("s0.r0", "s1.r0"):
        run.start(name)
        run.beat(name, 1)
    monkeypatch.setattr("funcpipe.cli.watch.open_storage", lambda url: run.raw)
    monkeypatch.setattr("funcpipe.cli.watch.open_platform", run.platform.open)
    monkeypatch.setattr("time.time", lambda: NOW_S)
    return run


WATCH = ["watch", "run-1", "--storage", "memory://"]


def test_one_look_ends_with_the_exit_code_of_status(
    run: SeenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WATCH, "--once"]) == 0
    assert "run run-1  running: step 3 of 16 is done" in capsys.readouterr().out
    monkeypatch.setattr("time.time", lambda: NOW_S + 9999)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main([*WATCH, "--once", "--json"]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    seen = json.loads(line)
    assert (seen["format"], seen["status"]["verdict"]) == ("funcpipe.run-view/1", "dead")


def test_it_looks_until_the_run_has_ended_and_says_how(
    run: SeenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        for name in ("s0.r0", "s1.r0")[len(pauses) - 1 :]:
            run.end(name, Outcome.HALTED)

    monkeypatch.setattr("time.sleep", sleep)
    assert main([*WATCH, "--interval", "3"]) == 0
    shown = capsys.readouterr().out
    assert pauses == [3.0]
    assert "running: step 3 of 16" in shown
    assert "run run-1  stopped: it was ended; step 0 of 16 is saved" in shown
    assert "resume it:  funcpipe train ... --resume run-1 --storage memory://" in shown


def test_a_dead_run_is_watched_until_no_watchdog_can_be_expected(
    run: SeenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [NOW_S + 9999]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))
    assert main([*WATCH, "--interval", "30"]) == 3
    assert capsys.readouterr().out.count(" dead: step 3 of 16") >= 3


def test_ctrl_c_leaves_the_run_as_it_is(
    run: SeenRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    before = {key: run.raw.get(key) for key in run.raw.list("")}
    assert main(WATCH) == 0
    shown = capsys.readouterr().out
    assert "run run-1 is as it was: watching changes nothing" in shown
    assert "watch it:   funcpipe run watch run-1 --storage memory://\n" in shown
    assert {key: run.raw.get(key) for key in run.raw.list("")} == before


def test_a_run_that_is_not_there_is_refused(
    run: SeenRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funcpipe.cli.watch.open_storage", lambda url: MemoryStorage())
    assert main(WATCH) == 2
    assert "there is no run 'run-1' in this storage" in capsys.readouterr().err
    assert main([*WATCH, "--interval", "0"]) == 2


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal as standard input; what is written to it is typed."""
    typed, stdin = pty.openpty()
    with open(stdin, closefd=True) as file:
        monkeypatch.setattr("sys.stdin", file)
        yield typed
    os.close(typed)


def test_a_terminal_shows_a_screen_until_the_key_is_pressed(
    run: SeenRun, terminal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()

    terminal_of_24_lines = Console(
        file=out, width=80, height=24, force_terminal=True, legacy_windows=False, highlight=False, markup=False
    )
    monkeypatch.setattr("funcpipe.show.terminal.Terminal", lambda: terminal_of_24_lines)
    os.write(terminal, b"q")
    assert main([*WATCH, "--interval", "600"]) == 0
    before, _, after = out.getvalue().partition("\x1b[?1049h")
    shown, _, after = after.partition("\x1b[?1049l")
    assert before == ""
    assert "q leaves the run as it is; looked at" in shown
    assert "run run-1 is as it was: watching changes nothing" in after


def test_a_key_ends_a_pause_at_once_and_others_do_not(terminal: int) -> None:
    with leaving_with("q") as pause:
        os.write(terminal, b"xy")
        pause(0.01)
        os.write(terminal, b"q")
        with pytest.raises(Left):
            pause(600.0)
