"""A result for people or for machines."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from funcpipe.core.json_form import to_plain
from funcpipe.core.process import write_out

if TYPE_CHECKING:
    from rich.console import Console


def as_json(value: Any) -> str:
    """`value` as one JSON text."""
    return json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n"


def show(machine: bool, text: str, draw: "Callable[[Console], object]") -> None:
    """Print `text` for machines, or let `draw` draw for people."""
    if machine:
        write_out(text, end="")
    else:
        from funcpipe.cli.render.terminal import Terminal

        draw(Terminal())
