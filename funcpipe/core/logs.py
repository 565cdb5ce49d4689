"""Logging of processes: people read the logs of a client, `funcpipe run logs` collects those of functions.

Modules use `logging.getLogger(__name__)` as usual; here is where lines go, from which level on, and in what form. A
function's line reads `2026-11-22T10:00:00.123Z INFO run=r worker=s0.r1 attempt=2 step=17 funcpipe.worker.loop: text`;
an indented line continues the one before it. Platforms keep such lines among others, which the user's code or the
platform has printed; `merged` reads them back, in the order of time.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, TextIO

from funcpipe.core.texts import printable, shortened
from funcpipe.errors import InvalidValue

LEVELS = "FUNCPIPE_LOG"
"""The environment variable with the levels: `debug`, or `info,funcpipe.worker=debug`."""

FILE = "FUNCPIPE_LOG_FILE"
"""The environment variable with the file that a function's lines are appended to; standard error without it."""

BEGINS = "the function begins"
"""The first line of a function, at any level: it names the run that the lines after it belong to."""

_ROOT = "funcpipe"
_NAMES = ("debug", "info", "warning", "error", "critical")
_log = logging.getLogger(__name__)


def configure(levels: str | None = None, *, stream: TextIO | None = None) -> None:
    """Have this process, a client, write its lines to `stream`, or to standard error.

    `levels` default to those of the environment, or else to `warning`; raises InvalidValue for others than there are.
    """
    handler = logging.StreamHandler(stream) if stream is not None else _ToStandardError()
    handler.setFormatter(_Format("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    _set_levels(levels or os.environ.get(LEVELS) or "warning")
    logging.getLogger(_ROOT).handlers[:] = [handler]


def unset() -> None:
    """Have this process, which was a client's, write no lines of its own any more."""
    logging.getLogger(_ROOT).handlers.clear()
    _set_levels("warning")


def wanted_in_functions() -> str:
    """Return the levels that a client wants in its functions: those of its environment, or else `INFO`."""
    levels = os.environ.get(LEVELS) or "INFO"
    read_levels(levels)
    return levels


def read_levels(text: str) -> Mapping[str, int]:
    """Return the level of each logger that `text` names; one without a name is that of all others."""
    found = {}
    for part in text.split(","):
        name, _, level = part.strip().rpartition("=")
        if level.lower() not in _NAMES or not (name or _ROOT).startswith(_ROOT):
            rule = f"must read LEVEL or LOGGER=LEVEL, with commas between them and one of {', '.join(_NAMES)}"
            raise InvalidValue("log level", text, rule)
        found[name or _ROOT] = int(getattr(logging, level.upper()))
    return found


@contextmanager
def in_function(*, run: str, worker: str, attempt: int, levels: str = "INFO") -> Iterator[None]:
    """Have every line that this process writes, in whichever thread, say which function it is.

    A process is at most one function at a time; what it was before does not show in the lines of the next.
    """
    path = os.environ.get(FILE)
    with open(path, "a", encoding="utf-8", opener=_private) if path else _left_open(sys.stderr) as stream:
        handler = _handler(stream, run=run, worker=worker, attempt=attempt)
        root = logging.getLogger(_ROOT)
        before = root.handlers[:], root.propagate
        _set_levels(levels)
        root.handlers[:], root.propagate = [handler], False  # a cloud's runtime may have its own at the root of all
        _context.step, _context.in_function = None, True
        try:
            handler.handle(_log.makeRecord(_log.name, logging.INFO, __file__, 0, BEGINS, (), None))
            yield
        finally:
            root.handlers[:], root.propagate = before
            _context.step, _context.in_function = None, False


def is_function() -> bool:
    """Return True if this process is a function now, so that its client warns of what concerns both."""
    return _context.in_function


def at_step(step: int) -> None:
    """Have the lines from now on say that they belong to `step`."""
    _context.step = step


@contextmanager
def kept(path: str, *, run: str, worker: str) -> Iterator[None]:
    """Append the lines of this process, a client, to the file `path` as well, as a function's lines are."""
    with open(path, "a", encoding="utf-8", opener=_private) as stream:
        handler = _handler(stream, run=run, worker=worker, attempt=0)
        root = logging.getLogger(_ROOT)
        before = root.level, {other: other.level for other in root.handlers}
        level = root.getEffectiveLevel()
        for other in root.handlers:
            other.setLevel(max(other.level, level))  # they show no more than before
        handler.setLevel(logging.INFO)
        root.addHandler(handler)
        root.setLevel(min(level, logging.INFO))
        try:
            yield
        finally:
            root.removeHandler(handler)
            root.setLevel(before[0])
            for other, level in before[1].items():
                other.setLevel(level)


def stamp(time_s: float) -> str:
    """Return a moment as lines begin with it: UTC, to the millisecond."""
    whole_s, milliseconds = divmod(round(time_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole_s))}.{milliseconds:03}Z"


def prefix(time_s: float, level: str, *, run: str, worker: str, attempt: int, step: int | None = None) -> str:
    """Return the beginning of a function's line."""
    at = "" if step is None else f" step={step}"
    return f"{stamp(time_s)} {level} run={run} worker={worker} attempt={attempt}{at}"


class _Context:
    """The context that lines carry besides their message, for all threads of the process."""

    step: int | None = None
    in_function: bool = False


_context = _Context()


class _ToStandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment: notebooks and tests replace it, and close what it was."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard error."""
        return sys.stderr


class _Format(logging.Formatter):
    """The text that a handler writes of a record: message and traceback shortened to what is kept, printable only."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(shortened(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        return printable(shortened(super().formatException(ei)))


class _FormatOfFunction(_Format):
    """One line; a traceback goes on in lines that are indented."""

    def __init__(self, *, run: str, worker: str, attempt: int) -> None:
        super().__init__("%(name)s: %(message)s")
        self._run, self._worker, self._attempt = run, worker, attempt

    def format(self, record: logging.LogRecord) -> str:
        begin = prefix(
            record.created,
            record.levelname,
            run=self._run,
            worker=self._worker,
            attempt=self._attempt,
            step=_context.step,
        )
        return f"{begin} {super().format(record)}".replace("\n", "\n    ")


def _handler(stream: TextIO, *, run: str, worker: str, attempt: int) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_FormatOfFunction(run=run, worker=worker, attempt=attempt))
    return handler


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def _left_open(stream: TextIO) -> Iterator[TextIO]:
    yield stream


def _set_levels(text: str) -> None:
    levels = read_levels(text)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith(f"{_ROOT}.") and isinstance(logger, logging.Logger) and logger.level:
            logger.setLevel(logging.NOTSET)  # which empties a cache of every logger that there is
    for name, level in {_ROOT: logging.WARNING, **levels}.items():
        logging.getLogger(name).setLevel(level)


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
