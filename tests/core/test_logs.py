"""What processes write, read back, and merged with what others have written."""

import io
import logging
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import logs
from funcpipe.core.logs import PRINTED, LogLine, RawLine, merged, parsed, prefix
from funcpipe.errors import InvalidValue

_log = logging.getLogger("funcpipe.tests")


def test_a_function_s_lines_say_which_it_is_in_every_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.FILE, str(tmp_path / "log"))
    with logs.in_function(run="run-1", worker="s0.r1", attempt=2):
        logs.at_step(17)
        thread = threading.Thread(target=lambda: _log.warning("%d is late", 3))
        thread.start()
        thread.join()
        _log.debug("not wanted")
    with logs.in_function(run="run-2", worker="s1.r0", attempt=0, levels="error"):
        _log.warning("not wanted either")
    begun, late, next_begun = map(parsed, (tmp_path / "log").read_text().splitlines())
    assert isinstance(late, LogLine)
    assert (late.run, late.worker, late.attempt, late.step, late.level) == ("run-1", "s0.r1", 2, 17, "WARNING")
    assert late.text == "funcpipe.tests: 3 is late"
    assert begun is not None
    assert (begun.step, begun.text) == (None, "funcpipe.core.logs: the function begins")
    assert next_begun is not None
    assert (next_begun.run, next_begun.step) == ("run-2", None)
    assert capsys.readouterr().err == ""


def test_without_a_file_a_function_writes_to_standard_error_and_a_traceback_is_indented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(logs.FILE, raising=False)
    with logs.in_function(run="r", worker="w", attempt=0):
        try:
            raise ValueError("two\n\nlines")
        except ValueError:
            _log.exception("it failed")
    _, first, *more = capsys.readouterr().err.splitlines()
    assert "ERROR run=r worker=w attempt=0 funcpipe.tests: it failed" in first
    assert all(line.startswith("    ") for line in more)
    assert more[-1].strip() == "lines"


def test_a_client_s_lines_are_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.LEVELS, raising=False)
    stream = io.StringIO()
    logs.configure(stream=stream)
    _log.info("not wanted")
    _log.warning("worker s0.r1 has died")
    assert stream.getvalue().partition(" ")[2] == "WARNING funcpipe.tests: worker s0.r1 has died\n"
    monkeypatch.setenv(logs.LEVELS, "error,funcpipe.tests=debug")
    logs.configure(stream=stream)
    _log.debug("wanted now")
    logging.getLogger("funcpipe.other").warning("not wanted now")
    assert stream.getvalue().count("\n") == 2


def test_a_client_s_lines_are_kept_and_no_more_is_shown_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(logs.LEVELS, raising=False)
    stream = io.StringIO()
    logs.configure(stream=stream)
    with logs.kept(str(tmp_path / "client.log"), run="run-1", worker="client"):
        _log.info("began")
        _log.debug("a detail")
    _log.info("after the run")
    (line,) = map(parsed, (tmp_path / "client.log").read_text().splitlines())
    assert line is not None
    assert (line.run, line.worker, line.text) == ("run-1", "client", "funcpipe.tests: began")
    assert stream.getvalue() == ""
    logging.getLogger("funcpipe").setLevel(logging.DEBUG)
    _log.debug("shown again")  # whoever asks for more after the run gets it
    assert "shown again" in stream.getvalue()


@pytest.mark.parametrize("text", ["loud", "info,", "funcpipe.worker=", "os=debug", "funcpipe=5"])
def test_levels_that_there_are_not_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="log level must read LEVEL or LOGGER=LEVEL"):
        logs.configure(text)
    monkeypatch.setenv(logs.LEVELS, text)
    with pytest.raises(InvalidValue):
        logs.wanted_in_functions()


def test_functions_log_as_their_client_s_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.LEVELS, raising=False)
    assert logs.wanted_in_functions() == "INFO"
    monkeypatch.setenv(logs.LEVELS, "funcpipe.worker=debug")
    assert logs.wanted_in_functions() == "funcpipe.worker=debug"
    assert logs.stamp(0.9996) == "1970-01-01T00:00:01.000Z"


def test_a_text_of_any_length_and_signs_is_a_short_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.FILE, str(tmp_path / "log"))
    logging.getLogger("funcpipe").propagate = False  # to pytest, which would keep all of it
    page = "<html>\x1b]0;title\x07\ud800" + 10_000_000 * "x" + "</html>"
    with logs.in_function(run="run-1", worker="s0.r1", attempt=2):
        try:
            raise ValueError(page)
        except ValueError:
            _log.exception("failed: %s", page)
    stream = io.StringIO()
    logs.configure(stream=stream)
    _log.warning("failed: %s", page)
    for text in ((tmp_path / "log").read_text(), stream.getvalue()):
        assert 8_000 < len(text) < 20_000
        assert "failed: <html>\ufffd]0;title\ufffd\ufffdxxx" in text
        assert "xxx</html>" in text
        assert "\x1b" not in text
    assert capsys.readouterr().err == ""  # where the standard library tells that a line could not be written


texts = st.text("ab: =\t1", max_size=6)


@st.composite
def function(draw: st.DrawFn, name: str) -> list[RawLine]:
    """What one function of run-1 wrote: logged lines, whose clock may go back, and anything else between them."""
    lines = []
    for kind in draw(st.lists(st.sampled_from("lllpc"), max_size=8)):
        text = draw(texts)
        time_s = draw(st.integers(0, 50)) / 10
        if kind == "l":
            text = f"{prefix(time_s, 'INFO', run='run-1', worker=name, attempt=0)} {text}"
        elif kind == "c":
            text = f"    {text}"
        came_s = time_s if draw(st.booleans()) else None
        lines.append(RawLine(function=name, text=text, time_s=came_s))
    return lines


def is_logged(line: RawLine) -> bool:
    return "run=run-1" in line.text


@given(st.data())
def test_merging_is_by_time_keeps_each_function_s_order_and_loses_nothing(data: st.DataObject) -> None:
    written = {name: data.draw(function(name)) for name in ("s0.r0", "s0.r1", "s1.r0")}
    found = merged("run-1", [line for lines in written.values() for line in lines])
    assert all(a.time_s <= b.time_s for a, b in pairwise(found))
    for name, lines in written.items():
        mine = [line for line in found if line.worker == name]
        if not any(map(is_logged, lines)):
            assert mine == []
            continue
        expected = [line.text.split("attempt=0 ", 1)[-1] for line in lines]
        assert "\n".join(line.text for line in mine) == "\n".join(expected)
        assert [line.level for line in mine].count("INFO") == sum(map(is_logged, lines))


def raw(function: str, *texts: str) -> list[RawLine]:
    return [RawLine(function=function, text=text) for text in texts]


def logged(time_s: float, worker: str, text: str, run: str = "r", step: int | None = None) -> str:
    return f"{prefix(time_s, 'INFO', run=run, worker=worker, attempt=0, step=step)} {text}"


def test_a_traceback_stays_with_its_line_and_what_is_printed_with_its_function() -> None:
    one = raw("1", "loading", logged(1, "a", "fails", step=4), "    Traceback", "    ValueError", "bye")
    two = raw("2", logged(1.5, "b", "goes on"), logged(0.5, "b", "its clock was set back"))
    assert [(line.worker, line.level, line.time_s, line.text) for line in merged("r", one + two)] == [
        ("a", PRINTED, 1, "loading"),
        ("a", "INFO", 1, "fails\n    Traceback\n    ValueError"),
        ("a", PRINTED, 1, "bye"),
        ("b", "INFO", 1.5, "goes on"),
        ("b", "INFO", 1.5, "its clock was set back"),
    ]


def test_lines_of_other_runs_in_the_same_function_are_left_out() -> None:
    lines = raw("1", logged(1, "a", "first", run="old"), "of the old", logged(2, "a", "second"), "of the new")
    assert [line.text for line in merged("r", lines)] == ["second", "of the new"]
    assert merged("nobody", lines) == ()


def test_a_line_reads_as_it_is_shown() -> None:
    line = LogLine(time_s=0.25, level="INFO", run="r", worker="s0.r1", attempt=2, step=17, text="m: text")
    assert str(line) == "1970-01-01T00:00:00.250Z INFO    s0.r1 attempt=2 step=17 m: text"
