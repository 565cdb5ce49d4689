"""A result for people or for machines."""

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console

from funcpipe.core.json_form import to_plain


def as_json(value: Any) -> str:
    """`value` as one JSON text."""
    return json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n"


def show(machine: bool, text: str, draw: Callable[[Console], None]) -> None:
    """Print `text` for machines, or let `draw` draw for people."""
    if machine:
        print(text, end="")
    else:
        draw(Console(highlight=False, markup=False, emoji=False))
