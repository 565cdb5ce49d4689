"""What starts took, as a table, in words, and as a picture of functions."""

from dataclasses import replace

from funcpipe.core import WorkerReport
from funcpipe.core.start import Readiness, StartPart, StartTimes, median_parts
from funcpipe.platforms.base import StartClock
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.functions import functions_section, phases_of
from funcpipe.show.material import Material
from funcpipe.show.page_parts import Drawing
from funcpipe.show.starts import start_text, starts
from tests.run_documents import REPORT
from tests.show.large import material

COLD = StartTimes(readiness=Readiness.COLD, parts={"torch": 2.0, "code": 0.25, "setup": 0.5}, first_step_s=0.75)
WARM = StartTimes(readiness=Readiness.REUSED, parts={"code": 0.125, "predecessor": 7.0, "setup": 0.0625})


def report(start: StartTimes | None, first_step: int | None = 0) -> WorkerReport:
    return replace(REPORT, start=start, first_step=first_step)


def test_starts_are_told_by_readiness_part_by_part_and_without_the_wait_for_a_predecessor() -> None:
    slower = replace(COLD, parts={**COLD.parts, "torch": 3.0})
    table = starts([report(COLD), report(slower), report(WARM), report(None), report(WARM, first_step=None)])
    assert table is not None
    assert [column.name for column in table.columns] == [
        *("readiness", "starts", "torch s", "code s", "predecessor s", "setup s", "all s", "first step s"),
    ]
    assert table.rows == (
        ("cold", "2", "2.500", "0.250", "0", "0.500", "3.250", "0.750"),
        ("reused", "1", "0", "0.125", "7.000", "0.062", "0.188", "-"),
    )
    assert starts([report(None)]) is None
    assert start_text(COLD) == "cold, 2.75 s: torch 2 s, code 0.25 s, setup 0.5 s"
    assert median_parts([COLD, WARM])["torch"] == 1.0


def test_a_clock_takes_what_is_not_measured_for_the_set_up_and_says_when_it_is_over() -> None:
    told: list[StartTimes] = []
    clock = StartClock(Readiness.COLD, {StartPart.TORCH: 1.0}, ready=told.append)
    clock.add(StartPart.ENVIRONMENT, 5.0)  # which is over when the function begins
    clock.add(StartPart.CODE, 0.5)
    clock.add(StartPart.CODE, 0.25)
    clock.end(2.0)
    clock.step_ended(0.3)
    clock.step_ended(0.1)
    expected = {"environment": 5.0, "torch": 1.0, "code": 0.75, "setup": 0.25}
    assert (clock.times.parts, clock.times.first_step_s, clock.times.seconds) == (expected, 0.3, 7.0)
    assert told == [replace(clock.times, first_step_s=None)]


def test_phases_go_from_the_invocation_through_what_a_start_took_to_the_end() -> None:
    """A report's clock begins when modules are there: at 100 s, invoked 3 s before; the successor, at 150 s, waited."""
    parts = {"environment": 1.0, "torch": 2.0, "code": 0.5, "tensors": 0.5, "setup": 1.0}
    first = replace(REPORT, started_at_s=100.0, ended_at_s=160.0, start=replace(COLD, parts=parts))
    after = {"environment": 4.0, "code": 2.0, "predecessor": 6.0, "setup": 1.0}
    second = replace(first, attempt=1, started_at_s=150.0, ended_at_s=180.0, start=replace(WARM, parts=after))
    found = phases_of([second, replace(first, start=None), first])
    assert [(report.attempt, phases) for report, phases in found] == [
        (
            0,
            [
                ("environment", 0.0, 1.0),
                ("interpreter and modules", 1.0, 3.0),
                ("code and tensors", 3.0, 4.0),
                ("waiting for a predecessor", 4.0, 4.0),
                ("set-up", 4.0, 5.0),
                ("steps", 5.0, 63.0),
            ],
        ),
        (
            1,
            [
                ("environment", 49.0, 53.0),
                ("interpreter and modules", 53.0, 53.0),
                ("code and tensors", 53.0, 55.0),
                ("waiting for a predecessor", 55.0, 61.0),
                ("set-up", 61.0, 62.0),
                ("steps", 62.0, 83.0),
            ],
        ),
    ]


def test_the_page_shows_functions_beside_what_the_launch_rate_allows() -> None:
    """Three functions, of which two may start at once, and then one in five seconds; a cold start takes two."""
    finished = material().finished
    assert finished is not None
    assert functions_section(Material(finished=replace(finished, workers=(REPORT,)))) is None
    workers = tuple(replace(report(COLD), worker=f"s0.r{number}", started_at_s=9.0 * number) for number in range(3))
    spec = replace(load_spec("aws-lambda"), launches_10s=2, cold_start_s=2.0)
    section = functions_section(Material(finished=replace(finished, workers=workers), spec=spec))
    assert section is not None
    (drawing,) = section.parts
    assert isinstance(drawing, Drawing)
    sources = {renderer.name or "expected": renderer.data_source.data for renderer in drawing.figure.renderers}
    assert sources["steps"]["function"] == ["s0.r0, 0", "s0.r1, 0", "s0.r2, 0"]
    assert sources["interpreter and modules"]["left"] == [0.0, 9.0, 18.0]
    assert list(sources["expected"]["x"]) == [2.0, 2.0, 7.0]
    assert "launch rate" in drawing.caption
