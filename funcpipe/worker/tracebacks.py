"""The traceback of an exception in a function as a user sees it: frames of funcpipe and torch are only counted.

    Traceback (most recent call last):
      … 9 frames of funcpipe and torch
      File "model.py", line 12, in forward
        return self.head(x) / 0
    ZeroDivisionError: division by zero

The function's log has every frame.
"""

import traceback
from itertools import groupby
from pathlib import Path

import torch

import funcpipe
from funcpipe.core.texts import error_text, shortened
from funcpipe.errors import FuncPipeError

_PACKAGES = {"funcpipe": Path(funcpipe.__file__).parent, "torch": Path(torch.__file__).parent}


def describe(error: BaseException) -> str:
    """Return `error` in one line."""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else shortened(repr(error.code))
        return f"SystemExit: your code has called sys.exit({code}), which ends no run; raise an error to do that"
    return error_text(error)


def user_traceback(error: BaseException) -> str | None:
    """Return the traceback of `error` and its causes. Where the user's code had no part in it, it has all frames.

    An error of funcpipe's own says all in its message: it has a traceback only if there is a frame of the user's in it.
    """
    report = traceback.TracebackException.from_exception(error)
    folded = _fold(report)
    return None if isinstance(error, FuncPipeError) and not folded else shortened("".join(report.format()))


class _Folded(traceback.StackSummary):
    """Frames of which those of funcpipe and torch are only counted, but for the last, where the error was raised."""

    def format(self, **options: bool) -> list[str]:
        lines: list[str] = []
        *others, last = self
        for ours, frames in groupby(others, key=lambda frame: bool(_package_of(frame))):
            run = list(frames)
            if ours:
                names = " and ".join(sorted({name for frame in run if (name := _package_of(frame))}))
                lines.append(f"  … {len(run)} frame{'s' * (len(run) > 1)} of {names}\n")
            else:
                lines += traceback.StackSummary.from_list(run).format()
        return lines + traceback.StackSummary.from_list([last]).format()


def _fold(report: traceback.TracebackException) -> bool:
    """Fold the frames of an error, and of those that led to it, that users have frames in; whether there was one."""
    users = any(not _package_of(frame) for frame in report.stack)
    if users:
        report.stack = _Folded(report.stack)
    others = [_fold(other) for other in (report.__cause__, report.__context__) if other is not None]
    return users or any(others)


def _package_of(frame: traceback.FrameSummary) -> str | None:
    """Return the package of a frame, if it is one whose frames say little to a user; generated code is torch's."""
    if frame.filename.startswith("<"):
        return "torch"
    return next((name for name, folder in _PACKAGES.items() if Path(frame.filename).is_relative_to(folder)), None)
