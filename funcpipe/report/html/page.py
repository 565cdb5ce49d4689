"""The page as a whole: its sections, the plotting library and the style, all in one file."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from funcpipe.core.distribution import needed_from
from funcpipe.core.texts import encodable
from funcpipe.errors import InputError
from funcpipe.report.html.bill_section import bill_section
from funcpipe.report.html.environment_section import environment_section
from funcpipe.report.html.markup import Drawing, Section
from funcpipe.report.html.material import Material
from funcpipe.report.html.plan_section import plan_section
from funcpipe.report.html.progress_section import progress_section
from funcpipe.report.html.spent_section import spent_section
from funcpipe.report.html.timeline_section import timeline_section

_SECTIONS = (plan_section, progress_section, timeline_section, spent_section, bill_section)


def write_page(material: Material, path: str | Path) -> None:
    """Write the report of `material` to `path`; raises InputError if there is nothing to show, or no library."""
    Path(path).write_text(encodable(page(material)), encoding="utf-8")


def page(material: Material) -> str:
    """The text of the page. It has the sections for which there is material."""
    with needed_from("report"):
        from bokeh.embed import components
        from bokeh.resources import Resources
        from jinja2 import Environment, PackageLoader, StrictUndefined

    known = material.completed()
    found = [section for make in _SECTIONS if (section := make(known)) is not None]
    if not found:
        raise InputError("there is nothing to report on: name a plan, a trace, or what a run left")
    sections = [*found, environment_section(known)]
    drawings = list(_drawings(sections))
    script, divisions = components([drawing.figure for drawing in drawings]) if drawings else ("", ())
    environment = Environment(
        loader=PackageLoader("funcpipe.report.html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        title=known.title,
        lead=_lead(known),
        sections=sections,
        places={id(drawing): place for drawing, place in zip(drawings, divisions, strict=True)},
        is_drawing=lambda part: isinstance(part, Drawing),
        identity=id,
        library=Resources(mode="inline", components=["bokeh"]).render(),
        script=script,
        style=_file("style.css"),
        behaviour=_file("page.js"),
    )


def _drawings(sections: list[Section]) -> Iterator[Drawing]:
    for section in sections:
        yield from (part for part in section.parts if isinstance(part, Drawing))


def _file(name: str) -> str:
    return resources.files("funcpipe.report.html").joinpath("templates", name).read_text(encoding="utf-8")


def _lead(material: Material) -> str:
    """The subject of the page, in a line."""
    kinds = {"observed": material.observed, "predicted": material.predicted}
    traces = " and ".join(kind for kind, trace in kinds.items() if trace is not None)
    model = "" if material.plan is None else f"{material.plan.model or 'model'} on {material.plan.platform}"
    return "; ".join(filter(None, [model, f"{traces} timeline" if traces else ""]))
