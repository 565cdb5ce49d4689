"""The local history: a file of JSON lines, the newest last.

A line is an observation, a comparison of ways to do a job, or what a run by one of them took. The file is
`$FUNCPIPE_HISTORY`; without that variable `funcpipe/history.jsonl` where the user's programs keep their data
(`$XDG_DATA_HOME`, else `~/.local/share`). An empty variable turns the history off. Writers of several processes take
turns by a lock on a file beside it, and append with one write. A file above `MOST_BYTES` keeps its newest half.
"""

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from funcpipe.core import Comparison, Observation, WayRun, from_text, to_text
from funcpipe.core.process import data_folder
from funcpipe.errors import FormatError, FuncPipeError

FILE = "FUNCPIPE_HISTORY"
"""The environment variable with the file; empty for no history."""

MOST_BYTES = 1 << 20
"""About 3,500 observations."""

MOST_COMPARISONS = 50
"""More of them would take the room of observations: each is some 3 kB."""

LOCK_S = 30.0
"""The longest wait of a writer for its turn, so that no run hangs at its end; others take milliseconds."""

_POLL_S = 0.02

_log = logging.getLogger(__name__)

Entry = Observation | Comparison | WayRun
"""A line of the history."""

_KINDS = {kind.FORMAT: kind for kind in (Observation, Comparison, WayRun)}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All lines of the history by their kind, the oldest first."""

    observations: tuple[Observation, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    way_runs: tuple[WayRun, ...] = ()


def history_file() -> Path | None:
    """The path of the history; None if it is turned off. Raises OSError where there is no place for it."""
    path = os.environ.get(FILE)
    if path is not None:
        return Path(path).expanduser() if path else None
    return data_folder() / "history.jsonl"


@contextmanager
def filing(what: str) -> Iterator[None]:
    """Turn errors while `what` is filed in the history into warnings, so that no run fails."""
    try:
        yield
    except (OSError, FuncPipeError) as error:
        _log.warning("%s is not in the history: %s; %s names another file, or none if it is empty", what, error, FILE)


def append(path: Path, entries: Sequence[Entry], *, most_bytes: int = MOST_BYTES, lock_s: float = LOCK_S) -> None:
    """Add the entries that are not in the history yet: a run that is collected again is filed once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, lock_s):
        before = path.read_bytes() if path.exists() else b""
        known = [entry for _, entry in _entries(path, before) if entry is not None]
        there = {_identity(entry) for entry in known}
        added = [entry for entry in entries if _identity(entry) not in there]
        lines = "".join(f"{_line(entry)}\n" for entry in added).encode()
        if not lines:
            return
        if before and not before.endswith(b"\n"):  # of a writer that died
            lines = b"\n" + lines
        if len(before) + len(lines) > most_bytes:
            _replace(path, _newest(before + lines, most_bytes // 2))
        elif sum(isinstance(entry, Comparison) for entry in (*known, *added)) > MOST_COMPARISONS:
            _replace(path, _with_fewer_comparisons(path, before + lines))
        else:
            _append(path, lines)


def read_history(path: Path | None = None) -> tuple[Observation, ...]:
    """All observations of the history, or of the file at `path`, as `read_all` finds them."""
    return read_all(path).observations


def read_all(path: Path | None = None) -> History:
    """All lines of the history, or of the file at `path`, the oldest first.

    Damaged lines are left out, and so is a file that cannot be read, each with a warning in the log.
    """
    try:
        path = path or history_file()
        if path is None:
            return History()
        found = [entry for _, entry in _entries(path, path.read_bytes()) if entry is not None]
    except FileNotFoundError:
        return History()
    except OSError as error:
        _log.warning("the history cannot be read: %s", error)
        return History()
    return History(
        observations=tuple(entry for entry in found if isinstance(entry, Observation)),
        comparisons=tuple(entry for entry in found if isinstance(entry, Comparison)),
        way_runs=tuple(entry for entry in found if isinstance(entry, WayRun)),
    )


def _entries(path: Path, content: bytes) -> Iterator[tuple[bytes, Entry | None]]:
    """Each line that is not empty, and what it is: None if it is damaged."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield line, from_text(_kind_of(line), line, source=f"{path}:{number}")
        except FormatError as error:
            _log.warning("a line of the history is skipped: %s", error)
            yield line, None


def _kind_of(line: bytes) -> type[Entry]:
    """The kind that a line names; of a line that names none, or is damaged, that of most lines."""
    try:
        return _KINDS.get(json.loads(line)["format"], Observation)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Observation


def _identity(entry: Entry) -> object:
    """The fields that are equal in an entry that is filed again."""
    match entry:
        case Comparison():
            return entry.key
        case WayRun():
            return entry.comparison, entry.run
        case _:
            return entry


def _line(entry: Entry) -> str:
    return json.dumps(json.loads(to_text(entry)))


def _with_fewer_comparisons(path: Path, content: bytes) -> bytes:
    """Without the oldest comparisons, so that there are half as many as there may be; those with runs go last."""
    lines = list(_entries(path, content))
    followed = {entry.comparison for _, entry in lines if isinstance(entry, WayRun)}
    keys = [entry.key for _, entry in lines if isinstance(entry, Comparison)]
    first_to_go = [key for key in keys if key not in followed] + [key for key in keys if key in followed]
    gone = set(first_to_go[: len(keys) - MOST_COMPARISONS // 2])
    kept = [line for line, entry in lines if not (isinstance(entry, Comparison) and entry.key in gone)]
    return b"".join(line + b"\n" for line in kept)


def _newest(content: bytes, most_bytes: int) -> bytes:
    """The last whole lines that fit in `most_bytes`, at least one."""
    lines, kept = content.splitlines(keepends=True), 0
    taken: list[bytes] = []
    for line in reversed(lines):
        if taken and kept + len(line) > most_bytes:
            break
        taken.append(line)
        kept += len(line)
    return b"".join(reversed(taken))


def _append(path: Path, lines: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        written = os.write(file, lines)
    finally:
        os.close(file)
    if written != len(lines):
        raise OSError(f"{path}: only {written} of {len(lines)} bytes were written")


def _replace(path: Path, content: bytes) -> None:
    file, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(file, "wb") as opened:
            opened.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextmanager
def _locked(path: Path, lock_s: float) -> Iterator[None]:
    """Own the history until the lock's file is closed; raises TimeoutError where another writer keeps it."""
    until_s = time.monotonic() + lock_s
    with open(path.with_name(f"{path.name}.lock"), "w", encoding="ascii") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise TimeoutError(f"another process has locked {lock.name} for {lock_s:g} s") from None
                time.sleep(_POLL_S)
        yield
