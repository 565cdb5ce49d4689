"""The verb completion: a script by which a shell completes verbs and options."""

import argparse
from typing import Any

from funcpipe.cli.options import add_verb
from funcpipe.core.process import write_out

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(verbs: Any) -> None:
    """`funcpipe completion`."""
    verb = add_verb(
        verbs,
        "completion",
        "print a script by which a shell completes options",
        'eval "$(funcpipe completion bash)"',
        module="completion",
    )
    verb.add_argument("shell", choices=SHELLS, help="which shell")


def completion(options: argparse.Namespace) -> None:
    """Print the script, which shtab makes from the parser of all verbs."""
    import shtab

    from funcpipe.cli.parser import build_parser

    write_out(shtab.complete(build_parser(), shell=options.shell))
