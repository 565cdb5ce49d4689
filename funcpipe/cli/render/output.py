"""A result for people or for machines, and the terminal that shows it."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from funcpipe.core.json_form import to_plain
from funcpipe.core.streams import leave_unread, write_out
from funcpipe.core.texts import printable


class Terminal(Console):
    """Standard output, or standard error: what is shown cannot command it, and its reader may leave at any time."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As any console, with a sign in place of control characters, which a stranger's plan may hold."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Show no more, as its reader, such as `head`, has read enough; the command goes on to its end."""
        self.quiet = True
        leave_unread(self.file)


def as_json(value: Any) -> str:
    """`value` as one JSON text."""
    return json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n"


def show(machine: bool, text: str, draw: Callable[[Console], object]) -> None:
    """Print `text` for machines, or let `draw` draw for people."""
    if machine:
        write_out(text, end="")
    else:
        draw(Terminal())
