"""Summaries of values: a few lines in Python, a small table or figure in a notebook.

The HTML is self-contained, has no script, and takes its colours from the page (`currentColor`), so it can be read on a
light and on a dark one. All text is escaped.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as escape_html

MOST_ROWS = 24
"""The rows of a table; longer ones lose their middle."""

HUES = {"compute": "#4e79a7", "upload": "#e68a2e", "download": "#59a14f", "merge": "#b07aa1", "load": "#9c755f"}
"""Colours of lanes that stand out from white and from black."""

_CELL = "padding:2px 10px 2px 0;border:0;vertical-align:top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of a value: a title, `facts` by name, and in notebooks a table of `rows` and a `figure` in SVG.

    Cells of all columns but the first are numbers, and stand to the right, unless the column is among `texts`.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    texts: tuple[str, ...] = ()
    figure: str = ""

    @property
    def text(self) -> str:
        """The title, and a line for each fact."""
        return "\n".join([_printable(self.title), *(_printable(f"  {name}: {fact}") for name, fact in self.facts)])

    @property
    def html(self) -> str:
        """All of it, as a part of a page."""
        parts = [f"<strong>{escape(self.title)}</strong>", self.figure, self._facts(), self._table()]
        return f'<div style="color:inherit;font-size:13px;line-height:1.4">{"".join(parts)}</div>'

    def _facts(self) -> str:
        rows = [
            f'<tr style="background:none"><td style="{_CELL};text-align:left;opacity:.7">{escape(name)}</td>'
            f'<td style="{_CELL};text-align:left">{escape(fact)}</td></tr>'
            for name, fact in self.facts
        ]
        return _as_table(rows)

    def _table(self) -> str:
        if not self.rows:
            return ""
        head = "".join(self._cell("th", name, i, "border-bottom:1px solid currentColor") for i, name in self._named())
        body = [
            f'<tr style="background:none">{"".join(self._cell("td", cell, i) for i, cell in enumerate(row))}</tr>'
            for row in shortened(self.rows)
        ]
        return _as_table([f'<tr style="background:none">{head}</tr>', *body])

    def _named(self) -> Sequence[tuple[int, str]]:
        return tuple(enumerate(self.columns))

    def _cell(self, tag: str, text: str, column: int, style: str = "") -> str:
        side = "left" if column == 0 or self.columns[column] in self.texts else "right"
        return f'<{tag} style="{_CELL};text-align:{side};{style}">{escape(text)}</{tag}>'


class HasSummary(ABC):
    """A value that Python and notebooks display by its summary."""

    __slots__ = ()

    @abstractmethod
    def summary(self) -> Summary:
        """Return the summary of this value."""

    def __repr__(self) -> str:
        return self.summary().text

    def _repr_html_(self) -> str:
        return self.summary().html


def escape(text: str) -> str:
    """Return `text` as a part of a page."""
    return escape_html(_printable(text))


def _printable(text: str) -> str:
    """Return `text` in one line, with a blank for characters that cannot be printed."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def shortened(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Return at most MOST_ROWS of `rows`: a line in the middle says how many are left out."""
    if len(rows) <= MOST_ROWS:
        return rows
    kept = (MOST_ROWS - 1) // 2
    more = (f"… {len(rows) - 2 * kept} more", *("" for _ in rows[0][1:]))
    return [*rows[:kept], more, *rows[-kept:]]


def curve(values: Sequence[float], *, width: int = 420, height: int = 90) -> str:
    """Return a line through `values` as an SVG; values that are not finite leave a gap. Empty for fewer than two."""
    finite = [value for value in values if abs(value) < float("inf")]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (height - 6) / (high - low) if high > low else 0.0
    points = [
        f"{6 + (width - 12) * i / (len(values) - 1):.1f},{height - 3 - (value - low) * scale:.1f}"
        if abs(value) < float("inf")
        else " "
        for i, value in enumerate(values)
    ]
    lines = "".join(
        f'<polyline points="{part.strip()}" fill="none" stroke="{HUES["compute"]}" stroke-width="1.5"/>'
        for part in " ".join(points).split("   ")
        if part.strip()
    )
    return figure(lines, width, height)


def figure(inside: str, width: int, height: int) -> str:
    """Return an SVG of so many pixels, that shrinks with the page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'style="max-width:100%;display:block;margin:6px 0" font-size="11" fill="currentColor">{inside}</svg>'
    )


def _as_table(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return f'<table style="border-collapse:collapse;color:inherit;margin:4px 0">{"".join(rows)}</table>'
