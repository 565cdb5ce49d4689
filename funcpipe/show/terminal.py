"""The terminal that shows results, with tables that fit it without cutting a number.

A column of numbers is as wide as its longest cell. Columns of text share what is left and wrap at spaces. Where even
that is too wide, whole columns are left out, the least important first, and a line below the table names them.
"""

import contextlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment
from rich.table import Table as RichTable

from funcpipe.core import Trace
from funcpipe.core.process import discard_output
from funcpipe.core.texts import printable
from funcpipe.show.describe import Column, Description, Table


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


_GANTT_LABEL = len("s0.r0 download ") + 3
"""Room for the name of a lane, with numbers of some digits."""

_GAP = 2
"""Blanks between two columns."""

_NARROWEST = 16
"""Width to which a column with longer words, such as names of layers, may shrink: they go on in the next line."""

Cells = Mapping[Column, Sequence[str]]
Widths = dict[Column, int]


def draw(described: Description | str, console: Console) -> None:
    """Print a description, or a text."""
    if isinstance(described, str):
        console.print(described)
        return
    if described.title:
        console.print(described.title, style="bold")
    for table in described.tables:
        if table.title:
            console.print(table.title, style="bold")
        print_table(console, table)
    if isinstance(described.figure, Trace):
        from funcpipe.show.timeline import gantt_lines

        for line in gantt_lines(described.figure, columns=max(console.width - _GANTT_LABEL, 20)):
            console.print(line, overflow="crop", no_wrap=True)
    for line in described.lines:
        console.print(line)
    for command in described.commands:
        console.print(command, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print the columns for which there is room, and name the others."""
    cells = {column: [row[i] for row in table.rows] for i, column in enumerate(table.columns)}
    widths = _widths(cells, console.width)
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for column, width in widths.items():
        drawn.add_column(column.name, width=width, justify="left" if column.text else "right", overflow="fold")
    for row in zip(*(cells[column] for column in widths), strict=True):
        drawn.add_row(*row)
    console.print(_Whole(drawn, max(console.width, _total(widths))), crop=False)
    left_out = [column.name for column in table.columns if column not in widths]
    if left_out:
        console.print(f"left out for lack of width: {', '.join(left_out)} (--json has everything)", style="dim")


@dataclass(frozen=True, slots=True)
class _Whole:
    """A table in the width that it needs: in a terminal too narrow for all its numbers, lines go on in the next."""

    table: RichTable
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.table, options.update_width(self.width))


def _widths(cells: Cells, limit: int) -> Widths:
    """The columns to show and their widths, which are the least possible plus a share of what is left of `limit`."""
    widths = {column: _least(column, texts) for column, texts in cells.items()}
    while _total(widths) > limit and any(column.drop for column in widths):
        del widths[min((column for column in widths if column.drop), key=lambda column: column.drop)]
    missing = {column: _longest(cells[column], column.name) - width for column, width in widths.items()}
    spare = limit - _total(widths)
    for done, column in enumerate(sorted(missing, key=missing.__getitem__)):
        extra = max(min(missing[column], spare // (len(missing) - done)), 0)
        widths[column] += extra
        spare -= extra
    return widths


def _least(column: Column, texts: Sequence[str]) -> int:
    header = max(map(len, column.name.split()), default=0)
    if not column.text:
        return max(header, _longest(texts))
    return max(header, min(max((len(word) for text in texts for word in text.split()), default=0), _NARROWEST))


def _longest(texts: Sequence[str], *more: str) -> int:
    return max((len(line) for text in (*texts, *more) for line in text.splitlines()), default=0)


def _total(widths: Widths) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


@contextlib.contextmanager
def profiling(*, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Yield a callback for the name of a layer and the share of the work that is done."""
    columns = (TextColumn("profiling"), BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.description}"))
    with Progress(*columns, console=Terminal(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, completed=share, description=name)
