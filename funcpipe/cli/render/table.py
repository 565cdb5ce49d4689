"""Tables that fit a terminal without cutting a number.

A column of numbers is as wide as its longest cell. Columns of text share what is left and wrap at spaces. Where even
that is too wide, whole columns are left out, the least important first, and a line below the table names them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_GAP = 2
"""Blanks between two columns."""

_NARROWEST = 16
"""Width to which a column with longer words, such as names of layers, may shrink: they go on in the next line."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, of numbers unless it is `text`. Those with the lowest `drop` are left out first, those with 0 never."""

    name: str
    text: bool = False
    drop: int = 0


Cells = Mapping[Column, Sequence[str]]
Widths = dict[Column, int]


def print_table(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows`, each with a cell for each column."""
    cells = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
    widths = _widths(cells, console.width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for column, width in widths.items():
        table.add_column(column.name, width=width, justify="left" if column.text else "right", overflow="fold")
    for row in zip(*(cells[column] for column in widths), strict=True):
        table.add_row(*row)
    console.print(title, style="bold")
    console.print(_Whole(table, max(console.width, _total(widths))), crop=False)
    left_out = [column.name for column in columns if column not in widths]
    if left_out:
        console.print(f"left out for lack of width: {', '.join(left_out)} (--json has everything)", style="dim")


@dataclass(frozen=True, slots=True)
class _Whole:
    """A table in the width that it needs: in a terminal too narrow for all its numbers, lines go on in the next."""

    table: Table
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
