"""What the parser is made of."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any


def add_verb(verbs: Any, name: str, help_text: str, example: str, module: str = "verbs") -> argparse.ArgumentParser:
    """A verb whose function is that of the same name in `module` of `funcpipe.cli`, imported when it is called."""
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def run(options: argparse.Namespace) -> None:
        function: Callable[[argparse.Namespace], None] = getattr(
            importlib.import_module(f"funcpipe.cli.{module}"), name
        )
        function(options)

    verb.set_defaults(run=run)
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    return verb


def add_choice(verb: argparse._ActionsContainer, name: str, choices: list[str], default: str, help_text: str) -> None:
    """An option that takes one of `choices`."""
    verb.add_argument(name, choices=choices, default=default, help=f"{help_text} (default: {default})")
