import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Event, Resource, Source, Trace, read_trace, write_trace
from funcpipe.errors import FormatError, InvalidValue


@st.composite
def events(draw: st.DrawFn) -> Event:
    start_s = draw(st.floats(0, 1e6))
    return Event(
        task=draw(st.text(max_size=20)),
        stage=draw(st.integers(0, 9)),
        replica=draw(st.integers(0, 9)),
        lane=draw(st.sampled_from(Resource)),
        step=draw(st.integers(0, 1000)),
        start_s=start_s,
        end_s=start_s + draw(st.floats(0, 1e3)),
        payload_bytes=draw(st.integers(0, 2**40)),
        waited_s=draw(st.floats(0, 10)),
    )


@given(st.lists(events(), max_size=8).map(tuple), st.sampled_from(Source))
def test_a_trace_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, found: tuple[Event, ...], source: Source
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = Trace(run="run-1", source=source, events=found)
    write_trace(trace, path)
    assert read_trace(path) == trace


def test_the_file_is_in_the_chrome_trace_event_form(tmp_path: Path) -> None:
    event = Event(task="forward.s0.r1.m2", stage=0, replica=1, lane=Resource.UPLOAD, step=3, start_s=1.5, end_s=2.0)
    write_trace(Trace(run="r", source=Source.EXECUTED, events=(event,)), tmp_path / "t.json")
    entries = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"], s["tid"]) for s in spans] == [("forward.s0.r1.m2", 1.5e6, 0.5e6, 1)]
    labels = {entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert labels == {"stage 0 replica 1", "compute", "upload", "download", "merge", "load", "to-host", "to-device"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "funcpipe.trace/1"}',
        '{"format": "funcpipe.trace/1", "traceEvents": [3]}',
        '{"format": "funcpipe.trace/1", "traceEvents": []}',
        '{"format": "funcpipe.trace/1", "run": "r", "source": "executed", "traceEvents": [{"ph": "X"}]}',
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(FormatError, match=r"t\.json"):
        read_trace(tmp_path / "t.json")


def test_an_event_does_not_end_before_it_starts() -> None:
    with pytest.raises(InvalidValue, match="end_s must not lie before start_s=2"):
        Event(task="t", stage=0, replica=0, lane=Resource.COMPUTE, step=0, start_s=2.0, end_s=1.0)
