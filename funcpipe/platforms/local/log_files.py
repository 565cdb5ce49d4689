"""Log files on this machine: one for each function, and one for the client, in a folder for each run.

`$FUNCPIPE_LOG_DIR/RUN/WORKER.aATTEMPT.log`; without that variable `$XDG_STATE_HOME/funcpipe/logs`, which is below
`~/.local/state` unless set. The folders of the newest `KEPT_RUNS` runs are kept.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

from funcpipe.core.logs import RawLine, kept
from funcpipe.core.process import state_folder

FOLDER = "FUNCPIPE_LOG_DIR"
"""The environment variable with the folder."""

KEPT_RUNS = 50

CLIENT = "client"
"""The writer of lines that are not a function's."""


_log = logging.getLogger(__name__)


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
