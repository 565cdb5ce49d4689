"""What starts took, as a table and in words."""

from dataclasses import replace

from funcpipe.core import WorkerReport
from funcpipe.core.start import Readiness, StartPart, StartTimes, median_parts
from funcpipe.platforms.base import StartClock
from funcpipe.show.starts import start_text, starts
from tests.run_documents import REPORT

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
