"""A result for people or for machines."""

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console


def as_json(value: Any) -> str:
    """`value` as one JSON text."""
    return json.dumps(value, indent=1) + "\n"


def show(machine: bool, text: str, draw: Callable[[Console], None]) -> None:
    """Print `text` for machines, or let `draw` draw for people."""
    if machine:
        print(text, end="")
    else:
        draw(Console(highlight=False, markup=False, emoji=False))
