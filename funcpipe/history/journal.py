"""The local history: a file of JSON lines, an observation each, the newest last.

It is `$FUNCPIPE_HISTORY`; without that variable `funcpipe/history.jsonl` where the user's programs keep their data
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
from pathlib import Path

from funcpipe.core import Observation, from_text, to_text
from funcpipe.errors import FormatError

FILE = "FUNCPIPE_HISTORY"
"""The environment variable with the file; empty for no history."""

MOST_BYTES = 1 << 20
"""About 3,500 observations."""

LOCK_S = 30.0
"""How long a writer waits for its turn, which others take milliseconds for; so no run hangs at its end."""

_POLL_S = 0.02

_log = logging.getLogger(__name__)


def history_file() -> Path | None:
    """Where the history lies; None if it is turned off."""
    told = os.environ.get(FILE)
    if told is not None:
        return Path(told).expanduser() if told else None
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "funcpipe" / "history.jsonl"


def append(
    path: Path, observations: Sequence[Observation], *, most_bytes: int = MOST_BYTES, lock_s: float = LOCK_S
) -> None:
    """Add what is not in the history yet: a run that is collected again is filed once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, lock_s):
        before = path.read_bytes() if path.exists() else b""
        there = set(_observations(path, before))
        lines = "".join(f"{_line(one)}\n" for one in observations if one not in there).encode()
        if not lines:
            return
        if before and not before.endswith(b"\n"):  # of a writer that died
            lines = b"\n" + lines
        if len(before) + len(lines) > most_bytes:
            _replace(path, _newest(before + lines, most_bytes // 2))
        else:
            _append(path, lines)


def read_history(path: Path | None = None) -> tuple[Observation, ...]:
    """All observations of the history, or of the file at `path`, the oldest first.

    Damaged lines are left out, and so is a file that cannot be read, each with a warning in the log.
    """
    path = path or history_file()
    if path is None:
        return ()
    try:
        return tuple(_observations(path, path.read_bytes()))
    except FileNotFoundError:
        return ()
    except OSError as error:
        _log.warning("the history %s cannot be read: %s", path, error)
        return ()


def _observations(path: Path, content: bytes) -> Iterator[Observation]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield from_text(Observation, line, source=f"{path}:{number}")
        except FormatError as error:
            _log.warning("a line of the history is skipped: %s", error)


def _line(observation: Observation) -> str:
    return json.dumps(json.loads(to_text(observation)))


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
