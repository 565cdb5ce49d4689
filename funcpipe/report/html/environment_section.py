"""The versions that a report was made with, and the parts of the run."""

import platform
from collections.abc import Iterator
from importlib import metadata

from funcpipe.core.distribution import version
from funcpipe.report.html.markup import Section, table
from funcpipe.report.html.material import Material

_LIBRARIES = ("torch", "numpy", "pyomo", "highspy", "bokeh")


def environment_section(material: Material) -> Section:
    """The section, which is there always."""
    return Section(
        name="environment",
        title="Environment",
        parts=(table("Environment and versions", ("what", "value"), _rows(material), text=True),),
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
