"""Parts of the page: tables, notes and tiles in HTML with all text escaped, and empty figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from funcpipe.core.distribution import needed_from
from funcpipe.show.describe import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure of the plotting library, and in words what it shows. With `zooms`, it has buttons for its time axis."""

    figure: Any
    caption: str
    legend: tuple[tuple[str, str], ...] = ()
    zooms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page: `parts` are figures, and texts of HTML."""

    name: str
    title: str
    parts: tuple["Drawing | str", ...]


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(made: Table) -> str:
    """A table whose first column names the row. It scrolls sideways by itself where the page is narrow.

    Cells of numbers stay in one line, those of text wrap.
    """
    text = all(column.text for column in made.columns)
    top = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in made.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in made.rows
    )
    caption = escape(made.title)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">'
        f'<table class="{"text" if text else "numbers"}">'
        f"<caption>{caption}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts(made: Iterable[tuple[str, str]]) -> str:
    """Facts by name, as tiles."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in made)
    return f'<dl class="tiles">{items}</dl>'


COLOURS = {
    "l": "#8f6f4a",
    "f": "#3f7fd9",
    "j": "#1f9aa8",
    "b": "#2b9a63",
    ">": "#dd7a22",
    "<": "#b08900",
    "s": "#9a62c7",
    "n": "#d1569c",
    "u": "#d9534f",
    "waiting": "#9aa5b1",
}
"""The colours of what `timeline.NAMES` names; they stand out from white and from near-black."""

STAGES = ("#3f7fd9", "#dd7a22", "#2b9a63", "#9a62c7", "#d9534f", "#b08900", "#1f9aa8", "#d1569c")
"""The colours of stages, one after the other and over again."""

TOOLS = "xpan,xbox_zoom,xwheel_zoom,reset,save"


def chart(*, height: int, label: str = "", tools: str = "", **options: Any) -> Any:
    """A figure as wide as its page, of the plotting library; raises InputError if that is not installed."""
    with needed_from("report"):
        from bokeh.plotting import figure

    drawn = figure(
        height=height,
        sizing_mode="stretch_width",
        min_width=0,
        tools=tools,
        toolbar_location="above" if tools else None,
        x_axis_label=label,
        active_drag=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        output_backend="canvas",
        **options,
    )
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = False
    drawn.ygrid.grid_line_color = None
    drawn.axis.axis_line_alpha = 0.4
    drawn.axis.minor_tick_line_color = None
    return drawn


def bars(drawn: Any, name: str, colour: str, **columns: Any) -> Any:
    """Draw bars in one glyph, as colours of single bars would take long to read; `columns` has left, right, top and
    bottom of each, and what the hover tool shows.
    """
    edges = {edge: edge for edge in ("left", "right", "top", "bottom")}
    return drawn.quad(**edges, fill_color=colour, line_color=None, name=name, source=columns)


def set_hover(drawn: Any, tooltips: Sequence[tuple[str, str]], renderers: Sequence[Any] | None = None) -> None:
    """Set the texts of a figure's hover tool, for the glyphs `renderers`, by default all."""
    tool = next(tool for tool in drawn.toolbar.tools if type(tool).__name__ == "HoverTool")
    tool.tooltips = list(tooltips)
    if renderers is not None:
        tool.renderers = list(renderers)


def stage_colour(stage: int) -> str:
    """The colour of a stage."""
    return STAGES[stage % len(STAGES)]
