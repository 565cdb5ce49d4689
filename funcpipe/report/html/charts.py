"""Empty figures of the plotting library, the same on all pages, and their colours."""

from collections.abc import Sequence
from typing import Any

from funcpipe.core.distribution import needed_from

COLOURS = {
    "l": "#8f6f4a",
    "f": "#3f7fd9",
    "b": "#2b9a63",
    ">": "#dd7a22",
    "<": "#b08900",
    "s": "#9a62c7",
    "n": "#d1569c",
    "u": "#d9534f",
    "waiting": "#9aa5b1",
}
"""The colours of what `gantt.NAMES` names; they stand out from white and from near-black."""

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


def set_hover(drawn: Any, tooltips: Sequence[tuple[str, str]], renderers: Sequence[Any] | None = None) -> None:
    """Set the texts of a figure's hover tool, for the glyphs `renderers`, by default all."""
    tool = next(tool for tool in drawn.toolbar.tools if type(tool).__name__ == "HoverTool")
    tool.tooltips = list(tooltips)
    if renderers is not None:
        tool.renderers = list(renderers)


def stage_colour(stage: int) -> str:
    """The colour of a stage."""
    return STAGES[stage % len(STAGES)]
