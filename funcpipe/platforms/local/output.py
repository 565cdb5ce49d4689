"""Output of functions: copied to where their host prints, and kept, line by line, in the file of each function.

One file for each function, and one for the client, in a folder for each run:
`$FUNCPIPE_LOG_DIR/RUN/WORKER.aATTEMPT.log`; without that variable `$XDG_STATE_HOME/funcpipe/logs`, which is below
`~/.local/state` unless set. The folders of the newest `KEPT_RUNS` runs are kept.
"""

import contextlib
import logging
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from funcpipe.core import logs
from funcpipe.core.logs import PRINTED, RawLine, kept
from funcpipe.core.process import state_folder

if TYPE_CHECKING:
    import asyncio  # which a run that is refused does without

_log = logging.getLogger(__name__)

_CHUNK = 4096  # a pipe that can be written to takes so much at once: POSIX, PIPE_BUF
_CHUNKS = 256  # the most that a pipe holds, 1 MiB unless the system is configured otherwise: pipe(7)
_LONGEST_LINE = 64 * 1024
_RETRY_S = 0.02
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_STREAMS = (1, 2)  # standard output and error


class FunctionOutput:
    """The streams of one function and the file of its log, opened in the host before the function is forked.

    `trouble` says why there is no such file, if there is none.
    """

    def __init__(self, *, run: str, worker: str, attempt: int) -> None:
        self._run, self._worker, self._attempt = run, worker, attempt
        self.trouble: str | None = None
        self._path, self._file = os.devnull, -1
        try:
            self._path = str(log_file(run, f"{worker}.a{attempt}"))
            self._file = os.open(self._path, _APPEND, 0o600)
        except OSError as error:
            self.trouble = f"the logs of functions are not kept: {error}; {FOLDER} names another folder"
            self._file = os.open(os.devnull, _APPEND)
        self._pipes = [os.pipe() for _ in _STREAMS]
        self._copies: list[_Copy] = []
        self._has_ended = False

    @property
    def path(self) -> str:
        """The file of the log."""
        return self._path

    @property
    def ends(self) -> tuple[int, ...]:
        """The descriptors of the pipes that the function prints into."""
        return tuple(write for _, write in self._pipes)

    def enter_function(self) -> None:
        """Print into the pipes, and log to the file, in a function that was forked from the host."""
        for read, _ in self._pipes:
            os.close(read)
        os.close(self._file)
        print_into(self.ends, self._path)

    def copy(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Copy what the function prints from now on, in the host."""
        for stream, (read, write) in zip(_STREAMS, self._pipes, strict=True):
            os.close(write)
            self._copies.append(_Copy(self, loop, read, copied_to=stream))

    def abandon(self) -> None:
        """Close everything, as there is no function after all."""
        for descriptor in (self._file, *(end for pipe in self._pipes for end in pipe)):
            os.close(descriptor)

    def end(self, reason: str | None) -> None:
        """Copy what the function, which has ended, has printed; with a `reason`, note that it failed.

        A process that it left behind may print on, and a slow reader of the copy takes the rest later.
        """
        for copy in self._copies:
            copy.drain()
        if reason is not None:
            self.keep("ERROR", [f"the function was ended: {reason}".encode()])
        self._has_ended = True
        self.close_file()

    def close(self) -> None:
        """Copy what was printed, however slow its reader, and nothing after that."""
        for copy in self._copies:
            copy.close()

    def close_file(self) -> None:
        """Close the file when nothing more can come."""
        if self._has_ended and not any(copy.is_open for copy in self._copies) and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def keep(self, level: str, lines: list[bytes]) -> None:
        """Write lines to the file, each with the time and the function that it is of."""
        begin = logs.prefix(time.time(), level, run=self._run, worker=self._worker, attempt=self._attempt).encode()
        with contextlib.suppress(OSError):  # a full disk does not end a run
            _write(self._file, b"".join(b"%s %s\n" % (begin, line) for line in lines))


def print_into(ends: Sequence[int], log: str) -> None:
    """Print into the pipes with these `ends`, line by line, and log to the file `log`, in a function."""
    for stream, end in zip(_STREAMS, ends, strict=True):
        os.dup2(end, stream)
        os.close(end)
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            file.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # or a killed function's lines are lost
    os.environ[logs.FILE] = log


class _Copy:
    """One stream: the pipe `source`, copied to the descriptor `copied_to` and kept.

    The reader of the copy may be slow. The function waits for it then, as the pipe fills up; the host does not.
    """

    def __init__(
        self, output: FunctionOutput, loop: "asyncio.AbstractEventLoop", source: int, *, copied_to: int
    ) -> None:
        os.set_blocking(source, False)
        self._output, self._loop, self._source, self._copied_to = output, loop, source, copied_to
        self._rest = b""
        self._is_copied = self.is_open = True
        loop.add_reader(source, self._copy)

    def drain(self) -> None:
        for _ in range(_CHUNKS):
            if not (self.is_open and self._may_show() and self._copy_some()):
                return

    def close(self) -> None:
        for _ in range(_CHUNKS):
            if not (self.is_open and self._copy_some()):
                break
        self._end()

    def _copy(self) -> None:
        if self._may_show():
            self._copy_some()
        else:
            self._loop.remove_reader(self._source)
            self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        if self.is_open:
            self._loop.add_reader(self._source, self._copy)

    def _may_show(self) -> bool:
        if not self._is_copied:
            return True
        poll = select.poll()
        poll.register(self._copied_to, select.POLLOUT)
        return bool(poll.poll(0))

    def _copy_some(self) -> bool:
        """Copy one chunk; returns True if there was any. Ends when no process can print any more."""
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        if self._is_copied:
            try:
                _write(self._copied_to, data)
            except OSError:
                self._is_copied = False  # its reader is gone
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self._output.keep(PRINTED, lines)
        return True

    def _end(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._source)
            os.close(self._source)
            if self._rest:
                self._output.keep(PRINTED, [self._rest])
            self._output.close_file()


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


FOLDER = "FUNCPIPE_LOG_DIR"
"""The environment variable with the folder."""

KEPT_RUNS = 50

CLIENT = "client"
"""The writer of lines that are not a function's."""


def log_file(run: str, name: str) -> Path:
    """The file for `name`, a function or the client; its folder is there, and those of runs too long ago are not."""
    folder = _folder_of(run)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _remove_old(folder.parent)
    return folder / f"{quote(name, safe='')}.log"


@contextmanager
def keep_client_log(run: str) -> Iterator[None]:
    """Keep the log of this process, the client of `run`, as its functions' logs are kept."""
    with ExitStack() as stack:
        try:
            stack.enter_context(kept(str(log_file(run, CLIENT)), run=run, worker=CLIENT))
        except OSError as error:
            _log.warning("the log of run %s is not kept: %s; %s names another folder", run, error, FOLDER)
        yield


def read_logs(run: str) -> Iterator[RawLine]:
    """Yield the lines of all functions of a run on this machine, and of its client; none if nothing is known of it."""
    for path in sorted(_folder_of(run).glob("*.log")):
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from (RawLine(function=path.stem, text=line.rstrip("\n")) for line in lines)


def _folder_of(run: str) -> Path:
    name = quote(run, safe="")
    return _root() / (f"%2E{name[1:]}" if name.startswith(".") else name)  # no name of a run leads elsewhere


def _root() -> Path:
    if folder := os.environ.get(FOLDER):
        return Path(folder)
    return state_folder() / "logs"


def _remove_old(root: Path) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=_changed_s, reverse=True)
    for folder in folders[KEPT_RUNS:]:
        shutil.rmtree(folder, ignore_errors=True)  # another process may do it, too


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
