"""The lines of a run, from wherever its platform keeps them."""

import logging
from itertools import chain

from funcpipe.core.logs import PRINTED, LogLine, merged
from funcpipe.errors import InputError, RunUnknown
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import LOCAL, open_platform, open_storage
from funcpipe.platforms.local.log_files import read_logs
from funcpipe.platforms.local.platform import LocalPlatform


def run_lines(run: str, *, platform: str | None, storage: str | None) -> tuple[LogLine, ...]:
    """The lines of `run`, merged in time: those of its functions, and those of its client if that was here.

    Raises InputError where nothing is known of the run.
    """
    found = _open(run, platform, storage)
    kept = found.logs(run) if isinstance(found, LocalPlatform) else chain(found.logs(run), read_logs(run))
    lines = merged(run, kept)
    if not lines:
        where = f"on {platform}" if platform else f"on {found.url}" if storage else "on this machine"
        raise InputError(
            f"there are no logs of a run {run!r} {where}; --platform URL names the deployment that it ran on"
        )
    return lines


def is_wanted(line: LogLine, *, worker: str | None, level: str | None) -> bool:
    """Return True if a line is of `worker`, and at least of `level`."""
    name = "INFO" if line.level == PRINTED else line.level
    least = 0 if level is None else logging.getLevelNamesMapping()[level.upper()]
    return worker in (None, line.worker) and logging.getLevelNamesMapping().get(name, logging.INFO) >= least


def _open(run: str, platform: str | None, storage: str | None) -> Platform:
    if storage is not None:
        from funcpipe.runstate.generations import newest_record
        from funcpipe.runstate.keyring import signed

        try:
            return open_platform(newest_record(signed(open_storage(storage)), run).platform)
        except RunUnknown as error:
            raise InputError(f"{error}; without --storage, its logs may still be there") from None
    return LocalPlatform(f"{LOCAL}:") if platform in (None, LOCAL) else open_platform(platform)
