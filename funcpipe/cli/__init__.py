"""The verbs of funcpipe in a shell.

Exit code 0: done; 1: a run failed; 2: the input cannot be used; 3, of `status`: no function works on the run any more.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from funcpipe.cli.commands import parse
from funcpipe.core import logs
from funcpipe.core.process import end_output, ending_interrupts, prepare_streams, say
from funcpipe.core.texts import printable
from funcpipe.errors import FuncPipeError, RunInterrupted

if TYPE_CHECKING:
    from funcpipe.cli.verbs import Options

_WITH_FUNCTIONS = ("fit", "train", "verify", "evaluate", "predict")

_formatwarning = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    prepare_streams()
    warnings.formatwarning = _format_warning
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        _begin_again(options)
        logs.configure(_log_level(options))
        from funcpipe.cli.files import check_outputs

        check_outputs(options)
        with ending_interrupts():
            return int(options.run(options) or 0)
    except FuncPipeError as error:
        say("\n".join([f"funcpipe: {error}", *getattr(error, "__notes__", ())]))
        return error.exit_code
    except OSError as error:  # of what is outside: a full disk, a file that is gone meanwhile
        say(f"funcpipe: {error}; nothing of funcpipe's own has failed")
        return 2
    except KeyboardInterrupt as interrupt:
        say(f"funcpipe: {what_happened(interrupt)}")
        return 1
    finally:
        end_output()


def is_program() -> bool:
    """Return True if this process is the command `funcpipe`, and nothing else."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return file.name == "funcpipe" or file == Path(__file__).parents[1] / "__main__.py"


def _begin_again(options: "Options") -> None:
    """Begin this command again with the allocator of functions, if it is to have some on this machine.

    They can then be forked from it, which saves loading torch a second time.
    """
    if options.verb in _WITH_FUNCTIONS and getattr(options, "platform", "local") == "local" and is_program():
        from funcpipe.platforms import process as allocator

        allocator.restart_process()


def as_before() -> None:
    """Take back what `main` has set up for its process: one that is forked from it is none of a command."""
    warnings.formatwarning = _formatwarning
    logs.unset()


def what_happened(interrupt: BaseException | None) -> str:
    """The state in which Ctrl-C left the run, if there was one, and what the user can do now.

    Only the client knows whether it started a run or watched one that another process had started: it raises
    RunInterrupted, which says so, also where a second Ctrl-C came while this command cleaned up. Any other
    KeyboardInterrupt came before a run began, or after it had ended.
    """
    while interrupt is not None and not isinstance(interrupt, RunInterrupted):
        interrupt = interrupt.__context__
    if interrupt is None:
        return "interrupted"
    from funcpipe.client.control.commands import after_interrupt

    return "\n".join([f"interrupted; run {interrupt.run}: {interrupt.state}", *after_interrupt(interrupt)])


def _log_level(options: "Options") -> str | None:
    """The level of the log that -v or -q asks for; without them the environment decides."""
    if options.quiet:
        return "error"
    return {0: None, 1: "info"}.get(options.verbose, "debug")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"funcpipe: warning: {printable(str(message))}\n"
