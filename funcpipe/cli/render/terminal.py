"""The terminal that shows results."""

import textwrap
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from funcpipe.core.process import discard_output
from funcpipe.core.texts import printable


class Terminal(Console):
    """Standard output, or standard error: output cannot hold control characters, and readers may leave at any time.

    A line goes on in the next only where a person reads it, in a terminal, and only between words: paths stay whole.
    """

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as any console does, but wrap lines of text as said above."""
        if all(isinstance(item, str) for item in objects) and "overflow" not in options:
            if self.is_terminal and not options.get("soft_wrap"):
                objects = (self._wrapped(" ".join(objects)),)
            options["soft_wrap"] = True
        super().print(*objects, **options)

    def _wrapped(self, text: str) -> str:
        whole_words = partial(textwrap.wrap, width=self.width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(part for line in text.split("\n") for part in whole_words(line) or [""])

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as any console does, with a sign in place of control characters, which an untrusted plan may hold."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def on_broken_pipe(self) -> None:
        """Show no more, as its reader, such as `head`, has read enough; the command goes on to its end."""
        self.quiet = True
        discard_output(self.file)
