"""Lines of several functions, merged."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core.log_lines import PRINTED, LogLine, RawLine, merged
from funcpipe.core.logs import prefix

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
