"""Descriptions as a few lines of text in Python, and as a small table or figure in a notebook.

The HTML is self-contained, has no script, and takes its colours from the page (`currentColor`), so it can be read on a
light and on a dark one. All text is escaped.
"""

from collections.abc import Sequence
from html import escape as escape_html
from typing import Any

from funcpipe.core import Trace
from funcpipe.show.describe import Column, Table, describe
from funcpipe.show.page_parts import COLOURS

MOST_ROWS = 24
"""The rows of a table; longer ones lose their middle."""

_CELL = "padding:2px 10px 2px 0;border:0;vertical-align:top"
_TEXT = Column("", text=True)
_MOST_LANES = 24
_MOST_EVENTS = 1500
_ROW, _LEFT, _WIDTH = 14, 92, 640


def as_text(value: Any) -> str:
    """Return the title of a value's description, and a line for each fact."""
    described = describe(value)
    return "\n".join([_printable(described.title), *(f"  {_printable(line)}" for line in described.lines)])


def as_html(value: Any) -> str:
    """Return the description of a value as a part of a page."""
    described = describe(value)
    facts = [_row("td", [name, fact], (_TEXT, _TEXT)) for name, fact in described.facts]
    parts = [
        f"<strong>{_escaped(described.title)}</strong>",
        _figure(described.figure),
        _as_table(facts),
        *(_table(table) for table in described.tables if table.rows),
    ]
    return f'<div style="color:inherit;font-size:13px;line-height:1.4">{"".join(parts)}</div>'


def _table(table: Table) -> str:
    head = _row("th", [column.name for column in table.columns], table.columns, "border-bottom:1px solid currentColor")
    return _as_table([head, *(_row("td", row, table.columns) for row in shortened(table.rows))])


def _row(tag: str, cells: Sequence[str], columns: Sequence[Column], style: str = "") -> str:
    found = "".join(
        f'<{tag} style="{_CELL};text-align:{"left" if column.text else "right"};{style}">{_escaped(cell)}</{tag}>'
        for cell, column in zip(cells, columns, strict=True)
    )
    return f'<tr style="background:none">{found}</tr>'


def _as_table(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return f'<table style="border-collapse:collapse;color:inherit;margin:4px 0">{"".join(rows)}</table>'


def shortened(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Return at most MOST_ROWS of `rows`: a line in the middle says how many are left out."""
    if len(rows) <= MOST_ROWS:
        return rows
    kept = (MOST_ROWS - 1) // 2
    more = (f"… {len(rows) - 2 * kept} more", *("" for _ in rows[0][1:]))
    return [*rows[:kept], more, *rows[-kept:]]


def _escaped(text: str) -> str:
    return escape_html(_printable(text))


def _printable(text: str) -> str:
    """Return `text` in one line, with a blank for characters that cannot be printed."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _figure(figure: Trace | Sequence[float] | None) -> str:
    if isinstance(figure, Trace):
        return lanes(figure)
    return "" if figure is None else curve(figure)


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
        f'<polyline points="{part.strip()}" fill="none" stroke="{COLOURS["f"]}" stroke-width="1.5"/>'
        for part in " ".join(points).split("   ")
        if part.strip()
    )
    return _svg(lines, width, height)


def lanes(trace: Trace) -> str:
    """Return a trace as an SVG: a row for each lane of each worker, as far as there is room."""
    from funcpipe.show.timeline import lane_name, lanes_of, letter

    rows = lanes_of(trace)
    began_s = min((event.start_s for event in trace.events), default=0.0)
    scale = (_WIDTH - _LEFT) / max(trace.end_s - began_s, 1e-12)
    drawn = list(rows)[:_MOST_LANES]
    parts = [f'<text x="0" y="{row * _ROW + 10}">{lane_name(lane)}</text>' for row, lane in enumerate(drawn)]
    shown = [event for event in trace.events if rows[event.stage, event.replica, event.lane] < _MOST_LANES]
    for event in sorted(shown, key=lambda event: rows[event.stage, event.replica, event.lane])[:_MOST_EVENTS]:
        top = rows[event.stage, event.replica, event.lane] * _ROW
        x, width = _LEFT + (event.start_s - began_s) * scale, max((event.end_s - event.start_s) * scale, 0.5)
        waited = f", waited {event.waited_s:.4g} s" if event.waited_s else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW - 3}" '
            f'fill="{COLOURS[letter(event.task)]}" opacity="{0.35 if event.waited_s > event.busy_s else 0.9}">'
            f"<title>{_escaped(f'{event.task}: {event.busy_s:.4g} s{waited}')}</title></rect>"
        )
    more = len(rows) - len(drawn)
    if more:
        parts.append(f'<text x="0" y="{len(drawn) * _ROW + 10}">and {more} more lanes</text>')
    return _svg("".join(parts), _WIDTH, (len(drawn) + bool(more)) * _ROW + 2)


def _svg(inside: str, width: int, height: int) -> str:
    """Return an SVG of so many pixels, that shrinks with the page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'style="max-width:100%;display:block;margin:6px 0" font-size="11" fill="currentColor">{inside}</svg>'
    )
