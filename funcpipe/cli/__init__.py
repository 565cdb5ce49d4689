"""The verbs of funcpipe in a shell.

Exit code 0: done; 1: a run failed; 2: the input cannot be used; 3, of `status`: no function works on the run any more.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

from funcpipe.cli.files import check_writable
from funcpipe.cli.parser import build_parser
from funcpipe.core import logs
from funcpipe.errors import FuncPipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    warnings.formatwarning = _format_warning
    try:
        logs.configure(_log_level(options))
        check_writable(getattr(options, name, None) for name in ("output", "trace", "figure", "template_only"))
        return int(options.run(options) or 0)
    except FuncPipeError as error:
        print("\n".join([f"funcpipe: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        from funcpipe.cli.interrupts import what_happened

        print(f"funcpipe: {what_happened(interrupt)}", file=sys.stderr)
        return 1


def _log_level(options: argparse.Namespace) -> str | None:
    """The level of the log that -v or -q asks for; without them the environment decides."""
    if options.quiet:
        return "error"
    return {0: None, 1: "info"}.get(options.verbose, "debug")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"funcpipe: warning: {message}\n"
