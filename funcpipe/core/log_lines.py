"""Lines of logs as platforms keep them, read back and merged in time.

A function's line reads `2026-11-22T10:00:00.123Z INFO run=r worker=s0.r1 attempt=2 step=17 funcpipe.worker.loop: text`;
an indented line continues the one before it. Other lines were printed, by the user's code or by the platform.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar

from funcpipe.core.logs import stamp

PRINTED = "PRINT"
"""The level of lines that were printed rather than logged."""

_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) run=(?P<run>\S+) worker=(?P<worker>\S+) "
    r"attempt=(?P<attempt>\d+)(?: step=(?P<step>\d+))?(?: (?P<text>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """A line as a platform keeps it, and the time at which the platform received it, if known.

    `function` is any name that identifies a function: lines of the same name were written by one function.
    """

    function: str
    text: str
    time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a run's log. `text` is what was logged or printed, with the lines that continue it."""

    FORMAT: ClassVar[str] = "funcpipe.log/1"

    time_s: float
    level: str
    run: str
    worker: str
    attempt: int
    step: int | None
    text: str

    def __str__(self) -> str:
        at = "" if self.step is None else f" step={self.step}"
        return f"{stamp(self.time_s)} {self.level:7} {self.worker} attempt={self.attempt}{at} {self.text}"


def merged(run: str, lines: Iterable[RawLine]) -> tuple[LogLine, ...]:
    """Return the lines of `run`, merged in time. Lines of one function keep their order, whatever their clock says.

    A line that was printed belongs to its function, at the time at which the platform got it, or else at that of the
    line before it. Lines of functions that cannot be assigned to a worker are left out.
    """
    functions: dict[str, list[RawLine]] = {}
    for line in lines:
        functions.setdefault(line.function, []).append(line)
    found = [line for raw in functions.values() for line in _of_function(raw) if line.run == run]
    return tuple(sorted(found, key=lambda line: line.time_s))  # which is stable


def _of_function(lines: list[RawLine]) -> Iterator[LogLine]:
    last = next((found for line in lines if (found := parsed(line.text))), None)
    if last is None:
        return
    if lines[0].time_s is not None:
        last = replace(last, time_s=lines[0].time_s)
    current: LogLine | None = None
    for line in lines:
        logged = parsed(line.text)
        if logged is None and current is not None and line.text[:1].isspace():
            current = replace(current, text=f"{current.text}\n{line.text}")
            continue
        if current is not None:
            yield current
        came_s = last.time_s if line.time_s is None else line.time_s
        now = logged or replace(last, level=PRINTED, text=line.text, time_s=came_s)
        current = last = replace(now, time_s=max(now.time_s, last.time_s) if current is not None else now.time_s)
    if current is not None:
        yield current


def parsed(text: str) -> LogLine | None:
    """Return the line that a function logged; None if it was printed."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    step = match["step"]
    return LogLine(
        time_s=datetime.fromisoformat(match["time"]).timestamp(),
        level=match["level"],
        run=match["run"],
        worker=match["worker"],
        attempt=int(match["attempt"]),
        step=None if step is None else int(step),
        text=match["text"] or "",
    )
