"""Sections of the page: the plan over the graph of its layers: cuts, sizes, and what fills each function."""

from dataclasses import replace
from typing import Any

from funcpipe.core import MB, Estimate, Plan
from funcpipe.show.describe import Table, describe, megabytes
from funcpipe.show.material import Material
from funcpipe.show.page_parts import (
    Drawing,
    Section,
    chart,
    facts,
    set_hover,
    stage_colour,
    table,
)

_PARTS = (
    ("base", "base_bytes", "#8f9aa6"),
    ("state", "state_bytes", "#3f7fd9"),
    ("activations", "activation_bytes", "#2b9a63"),
    ("waste", "waste_bytes", "#d9534f"),
    ("data", "data_bytes", "#b08900"),
)
"""The parts of a function's memory: the field of a StageEstimate, and a colour."""


def plan_section(material: Material) -> Section | None:
    """The section; None without a plan."""
    plan, estimate = material.plan, material.estimate
    if plan is None:
        return None
    described = describe(replace(plan, estimate=estimate))
    size = ("functions", f"{plan.workers}: {len(plan.stages)} stages × {plan.replicas} replicas, {plan.schedule.value}")
    parts: list[Drawing | str] = [facts([size, *described.facts]), _graph(plan, material)]
    if estimate is not None:
        parts.append(_memory(plan, estimate))
    parts.append(table(_with_names(described.tables[0], plan)))
    return Section(name="plan", title="Plan", parts=tuple(parts))


def _with_names(stages: Table, plan: Plan) -> Table:
    """Return the table of the stages with the first and the last layer of each by name."""
    rows = []
    for (number, numbers, *rest), stage in zip(stages.rows, plan.stages, strict=True):
        names = f"{numbers} ({stage.layers[0]} … {stage.layers[-1]})" if stage.layers else numbers
        rows.append((number, names, *rest))
    return replace(stages, rows=tuple(rows), title="Stages")


def _graph(plan: Plan, material: Material) -> Drawing:
    """Layers from left to right, as high as their share of the time; arcs are tensors that pass over layers."""
    names, weights = _layers(plan, material)
    stage_of = [next(i for i, s in enumerate(plan.stages) if s.first <= layer < s.stop) for layer in range(len(names))]
    drawn = chart(height=260, label="layer, in the order of the model", tools="xpan,xbox_zoom,hover,reset,save")
    drawn.x_range.start, drawn.x_range.end = -0.7, len(names) - 0.3
    drawn.y_range.start, drawn.y_range.end = -0.05, 1.9
    drawn.yaxis.visible = False
    drawn.xgrid.grid_line_color = None
    bars = {
        "x": list(range(len(names))),
        "top": [0.12 + 0.88 * weight for weight in weights],
        "colour": [stage_colour(stage) for stage in stage_of],
        "layer": list(names),
        "stage": stage_of,
        "size": [plan.stages[stage].size for stage in stage_of],
    }
    layers = drawn.vbar(x="x", top="top", width=0.8, color="colour", source=bars)
    set_hover(drawn, [("layer", "@layer"), ("stage", "@stage on @size")], [layers])
    _arcs(drawn, material, stage_of)
    for number, stage in enumerate(plan.stages):
        if number:
            drawn.line([stage.first - 0.5] * 2, [0, 1.45], line_dash="dashed", color="#d9534f", line_width=2)
        middle = (stage.first + stage.stop - 1) / 2
        if len(plan.stages) <= 8:
            text = f"{number}: {stage.size}"
            drawn.text([middle], [1.66 if number % 2 else 1.48], [text], text_align="center", text_font_size="12px")
    height = "height: its share of the computing time; " if material.profile is not None else ""
    return Drawing(
        figure=drawn,
        caption=f"The layers of {plan.model or 'the model'}, coloured by stage ({height}dashed lines: cuts; "
        f"arcs: tensors between layers, red where a cut sends them). The table below lists the stages.",
    )


def _layers(plan: Plan, material: Material) -> tuple[tuple[str, ...], list[float]]:
    """The names of the layers that the plan counts, and the share of time of each in the slowest one's."""
    if material.profile is None:
        names = [
            stage.layers[i] if len(stage.layers) == stage.stop - stage.first else f"{stage.first + i}"
            for stage in plan.stages
            for i in range(stage.stop - stage.first)
        ]
        return tuple(names), [0.5] * len(names)
    layers = material.profile.layers
    spent_s = [layer.forward_s[-1] + layer.backward_s[-1] for layer in layers]
    most = max(spent_s) or 1.0
    return tuple(layer.name for layer in layers), [value / most for value in spent_s]


def _arcs(drawn: Any, material: Material, stage_of: list[int]) -> None:
    if material.profile is None:
        return
    edges = [(t, tensor_to) for t in material.profile.tensors for tensor_to in t.consumers]
    length = max((to - tensor.producer for tensor, to in edges), default=1)
    columns: dict[str, list[object]] = {name: [] for name in ("x0", "x1", "top", "colour", "name", "bytes")}
    for tensor, to in edges:
        cut = stage_of[tensor.producer] != stage_of[to]
        rise = 1.02 + 0.35 * ((to - tensor.producer) / length) ** 0.5
        values = (tensor.producer, to, rise, "#d9534f" if cut else "#8f9aa6", tensor.name)
        for name, value in zip(columns, (*values, megabytes(tensor.forward_bytes)), strict=True):
            columns[name].append(value)
    flat = [1.02] * len(edges)
    drawn.bezier(
        x0="x0", y0="y", x1="x1", y1="y", cx0="x0", cy0="top", cx1="x1", cy1="top",
        color="colour", line_width=1.5, source={**columns, "y": flat},
    )  # fmt: skip


def _memory(plan: Plan, estimate: Estimate) -> Drawing:
    """A bar for each stage, stacked by what fills it, beside what its function has."""
    rows = [f"stage {number}" for number in range(len(plan.stages))]
    drawn = chart(height=90 + 34 * len(rows), label="MB in one function", tools="hover", y_range=rows[::-1])
    filled = {name: [getattr(s, field) / MB for s in estimate.stages] for name, field, _ in _PARTS}
    limits = [stage.memory_mb for stage in plan.stages]
    present = [part for part in _PARTS if any(filled[part[0]])]
    drawn.hbar(y=rows, right=limits, height=0.82, fill_color="#8f9aa6", fill_alpha=0.16, line_color="#8f9aa6")
    bars = drawn.hbar_stack(
        [name for name, _, _ in present],
        y="stage",
        height=0.52,
        color=[colour for _, _, colour in present],
        source={"stage": rows, **{name: filled[name] for name, _, _ in present}},
    )
    set_hover(drawn, [("", "$name: @$name{0,0} MB")], bars)
    drawn.x_range.start = 0
    legend = tuple((name, colour) for name, _, colour in present)
    return Drawing(
        figure=drawn,
        legend=legend,
        caption="What fills the memory of each stage's functions at their peak, inside what the function has.",
    )
