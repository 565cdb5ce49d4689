"""The verbs of funcpipe in a shell. Exit code 0: done; 1: a run failed; 2: the input cannot be used."""

import sys
import warnings
from collections.abc import Sequence

from funcpipe.cli.arguments import build_parser
from funcpipe.cli.files import check_writable
from funcpipe.errors import FuncPipeError, WatchInterrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    warnings.formatwarning = _format_warning
    try:
        check_writable(getattr(options, name, None) for name in ("output", "trace", "figure", "template_only"))
        options.run(options)
    except FuncPipeError as error:
        print(f"funcpipe: {error}", file=sys.stderr)
        return error.exit_code
    except WatchInterrupted as interrupted:
        print(f"funcpipe: {interrupted}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("funcpipe: interrupted; the run was stopped and cleaned up", file=sys.stderr)
        return 1
    return 0


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"funcpipe: warning: {message}\n"
