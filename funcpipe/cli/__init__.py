"""The verbs of funcpipe in a shell.

Exit code 0: done; 1: a run failed; 2: the input cannot be used; 3, of `status`: no function works on the run any more.
"""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence

from funcpipe.cli.files import check_outputs
from funcpipe.cli.job_file import parse
from funcpipe.cli.parser import build_parser
from funcpipe.core import logs
from funcpipe.errors import FuncPipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    _write_what_the_terminal_can()
    warnings.formatwarning = _format_warning
    try:
        options = parse(build_parser(), sys.argv[1:] if arguments is None else arguments)
        logs.configure(_log_level(options))
        check_outputs(options)
        code = int(options.run(options) or 0)
        sys.stdout.flush()
        return code
    except FuncPipeError as error:
        print("\n".join([f"funcpipe: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # who reads the output, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of what is outside: a full disk, a file that is gone meanwhile
        print(f"funcpipe: {error}; nothing of funcpipe's own has failed", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        from funcpipe.cli.interrupts import what_happened

        print(f"funcpipe: {what_happened(interrupt)}", file=sys.stderr)
        return 1


def _write_what_the_terminal_can() -> None:
    """Let a terminal or a file that lacks a character, such as an arrow, show a question mark in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _log_level(options: argparse.Namespace) -> str | None:
    """The level of the log that -v or -q asks for; without them the environment decides."""
    if options.quiet:
        return "error"
    return {0: None, 1: "info"}.get(options.verbose, "debug")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"funcpipe: warning: {message}\n"
