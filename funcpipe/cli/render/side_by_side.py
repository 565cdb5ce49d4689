"""Plans or traces side by side in a terminal."""

from typing import TYPE_CHECKING

from rich.console import Console

from funcpipe.cli.render.table import Column, print_table

if TYPE_CHECKING:
    from funcpipe.report.side_by_side import SideBySide


def beside(found: "SideBySide", console: Console) -> None:
    """A row for each quantity, a column for each file; what differs is marked."""
    columns = (Column("", text=True), *(Column(name, text=True) for name in found.names))
    rows = [(f"{'*' if len(set(values)) > 1 else ' '} {what}", *values) for what, values in found.rows.items()]
    print_table(console, f"{len(found.names)} side by side; * marks what differs", columns, rows)
