"""The page as a whole: its sections, the plotting library and the style, all in one file."""

import platform
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

from funcpipe.core.distribution import needed_from, version
from funcpipe.core.texts import without_surrogates
from funcpipe.errors import InputError
from funcpipe.show.describe import Table
from funcpipe.show.functions import functions_section
from funcpipe.show.material import Material
from funcpipe.show.page_parts import Drawing, Section, table
from funcpipe.show.page_plan import plan_section
from funcpipe.show.page_run import bill_section, progress_section, spent_section
from funcpipe.show.timeline import timeline_section

_SECTIONS = (plan_section, progress_section, timeline_section, functions_section, spent_section, bill_section)


def write_page(material: Material, path: str | Path) -> None:
    """Write the report of `material` to `path`; raises InputError if there is nothing to show, or no library."""
    Path(path).write_text(without_surrogates(page(material)), encoding="utf-8")


def page(material: Material) -> str:
    """The text of the page. It has the sections for which there is material."""
    known = material.completed()
    found = [section for make in _SECTIONS if (section := make(known)) is not None]
    if not found:
        raise InputError("there is nothing to report on: name a plan, a trace, or what a run left")
    return page_of([*found, environment_section(known)], title=known.title, lead=_lead(known))


def page_of(sections: list[Section], *, title: str, lead: str) -> str:
    """The text of a page with these sections; `lead` is its subject in a line."""
    with needed_from("report"):
        from bokeh.embed import components
        from bokeh.resources import Resources
        from jinja2 import Environment, PackageLoader, StrictUndefined

    drawings = list(_drawings(sections))
    script, divisions = components([drawing.figure for drawing in drawings]) if drawings else ("", ())
    environment = Environment(
        loader=PackageLoader("funcpipe.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        title=title,
        lead=lead,
        sections=sections,
        places={id(drawing): place for drawing, place in zip(drawings, divisions, strict=True)},
        is_drawing=lambda part: isinstance(part, Drawing),
        identity=id,
        library=Resources(mode="inline", components=["bokeh"]).render() if drawings else "",
        script=script,
        style=_file("style.css"),
        behaviour=_file("page.js"),
    )


def _drawings(sections: list[Section]) -> Iterator[Drawing]:
    for section in sections:
        yield from (part for part in section.parts if isinstance(part, Drawing))


def _file(name: str) -> str:
    return resources.files("funcpipe.show").joinpath("templates", name).read_text(encoding="utf-8")


def _lead(material: Material) -> str:
    """The subject of the page, in a line."""
    kinds = {"observed": material.observed, "predicted": material.predicted}
    traces = " and ".join(kind for kind, trace in kinds.items() if trace is not None)
    model = "" if material.plan is None else f"{material.plan.model or 'model'} on {material.plan.platform}"
    return "; ".join(filter(None, [model, f"{traces} timeline" if traces else ""]))


_LIBRARIES = ("torch", "numpy", "pyomo", "highspy", "bokeh")


def environment_section(material: Material) -> Section:
    """The section, which is there always."""
    return Section(
        name="environment",
        title="Environment",
        parts=(table(Table.of("Environment and versions", ("what", "value"), _rows(material), text=True)),),
    )


def _rows(material: Material) -> Iterator[tuple[str, str]]:
    if material.record is not None:
        record = material.record
        yield "run", f"{record.run}, generation {record.generation}, seed {record.seed}"
        yield "data", f"{record.samples:,} samples, {record.epochs} epochs, {record.steps} steps"
        yield "ran on", record.platform
        yield "learning rate", record.lr_schedule or "constant"
        yield "losses are means over", record.loss_over or "samples"
    if material.finished is not None:
        used = sorted({report.instructions for report in material.finished.workers if report.instructions})
        yield "processor instructions", ", ".join(used) or "unknown"
        yield "run took", f"{material.finished.elapsed_s:,.1f} s"
    if material.plan is not None:
        plan = material.plan
        yield "planned for", plan.platform or "unknown"
        yield "computes in", plan.precision.value
        yield "travels in", ", ".join(wire.value for wire in plan.wires) + " (activations, gradients, sums)"
    if material.spec is not None:
        yield "prices and sizes", f"{material.spec.name}, {material.spec.region}, as of {material.spec.as_of}"
    if material.profile is not None:
        kind = "estimated" if material.profile.estimated else "measured"
        yield "profile", f"{len(material.profile.layers)} layers, {kind} for {material.profile.platform}"
    yield "report made by", f"funcpipe {version()}, Python {platform.python_version()}, {platform.platform()}"
    yield "libraries here", ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES)
