"""Makes the pictures and tables of README and docs that follow from the planner alone.

`python scripts/doc_figures.py` writes docs/pictures/*.png anew, in each page the table between a line
`<!-- table: NAME -->` and a line `<!-- end of table -->`, and, with Chromium, the pictures of a report. Everything is
planned for AWS Lambda's specification from the profiles in experiments/profiles, so it comes out alike on every
machine: tests compare pages with it.
"""

import re
import runpy
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from funcpipe.analysis.predict import predict
from funcpipe.core import Estimate, ModelProfile, Resource, Source, Trace, TrainingSpec, read
from funcpipe.partitioner.alternatives import pareto_front, plot_front
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.material import Material
from funcpipe.show.page import write_page
from funcpipe.show.page_parts import COLOURS
from funcpipe.show.timeline import NAMES, spans_of

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "experiments" / "profiles"
PICTURES = ROOT / "docs" / "pictures"
SPEC = load_spec("aws-lambda")
BATCH, TIME_VALUE = 64, 3.84
MODELS = {
    "ResNet-101": "resnet101",
    "AmoebaNet-D18": "amoebanet-d18",
    "AmoebaNet-D36": "amoebanet-d36",
    "BERT-Large": "bert-large",
}
TIME_VALUES = (0.0, TIME_VALUE, 30.72, 245.76)
_PICTURES_OF_REPORT: tuple[tuple[str, int, int, Literal["light", "dark"], str], ...] = (
    ("desktop", 1280, 1000, "light", ""),
    ("phone", 375, 1100, "light", ""),
    ("dark", 1280, 1100, "dark", "timeline"),
)
"""The name, width, height, colours and first section of each."""

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def profile(model: str) -> ModelProfile:
    """The measured profile of one of MODELS."""
    return read(ModelProfile, PROFILES / f"{MODELS[model]}.json")


def compared(models: Iterable[str] = MODELS) -> Iterator[str]:
    """An iteration of 64 samples on AWS Lambda: workers that hold the whole model, and our plans beside them."""
    yield (
        "| model | LambdaML | ours, costing no more | LambdaML-GA | ours, costing no more "
        "| ours, an hour worth $3.84 |\n"
    )
    yield "|---|--:|--:|--:|--:|--:|\n"
    for model in models:
        measured, cells = profile(model), []
        for policy in ("lambdaml", "lambdaml-ga"):
            theirs = _estimate(measured, policy=policy)
            cells += [theirs, _estimate(measured, budget_usd=theirs.cost_usd * (1 + 1e-9))]
        cells.append(_estimate(measured, time_value=TIME_VALUE))
        yield f"| {model} | {' | '.join(map(_cell, cells))} |\n"


def weighed(values: Iterable[float] = TIME_VALUES) -> Iterator[str]:
    """BERT-Large at the four weights of time against money that the paper uses."""
    yield "| an hour saved is worth | s | $ for 1,000 iterations | stages × replicas | functions of (MB) |\n"
    yield "|--:|--:|--:|--:|---|\n"
    for value in values:
        plan = optimize(profile("BERT-Large"), SPEC, TrainingSpec(global_batch=BATCH, time_value=value))
        assert plan.estimate is not None
        sizes = ", ".join(sorted({f"{stage.memory_mb:,}" for stage in plan.stages}))
        seconds, dollars = f"{plan.estimate.iteration_s:.2f}", f"{1000 * plan.estimate.cost_usd:.2f}"
        yield f"| ${value:g} | {seconds} | {dollars} | {len(plan.stages)} × {plan.replicas} | {sizes} |\n"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {"compared": compared, "weighed": weighed}


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """A page with its tables as they are now."""
    return _TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]}{match[3]}", text)


def tables_in(text: str) -> Iterator[str]:
    """The names of the tables in a page that this script writes."""
    return (match[2] for match in _TABLE.finditer(text))


def draw(folder: Path) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = profile("BERT-Large")
    plot_front(pareto_front(measured, SPEC, TrainingSpec(global_batch=BATCH)), folder / "front.png")
    plan = optimize(measured, SPEC, TrainingSpec(global_batch=BATCH, time_value=TIME_VALUE))
    draw_iteration(predict(plan, measured, SPEC), folder / "timeline.png")


def draw_iteration(trace: Trace, path: Path) -> None:
    """Draw a row for each function, with its lanes one below the other, so narrow that a phone shows it."""
    figure = Figure(figsize=(4.4, 4.0), layout="constrained")
    axes = figure.subplots()
    lanes = (Resource.UPLOAD, Resource.COMPUTE, Resource.DOWNLOAD)
    for event in trace.from_zero().events:
        for kind, start_s, end_s in spans_of(event):
            below = event.stage + 0.28 * (lanes.index(event.lane) - 1) - 0.12
            axes.broken_barh([(start_s, end_s - start_s)], (below, 0.24), facecolors=COLOURS[kind], linewidth=0)
    stages = 1 + max(event.stage for event in trace.events)
    axes.set_yticks(range(stages), [f"function {stage + 1}" for stage in range(stages)], fontsize=11)
    axes.invert_yaxis()
    axes.tick_params(labelsize=11)
    axes.set_xlabel("seconds", fontsize=11)
    named = ("forward", "backward", "upload", "download")
    handles = [Patch(color=COLOURS[key], label=name) for key, name in NAMES.items() if name in named]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=11, frameon=False)
    figure.savefig(path, dpi=200)


def draw_reports(folder: Path) -> None:
    """Write what a browser shows of a report: in a window, on a phone, and in dark colours from the timeline on."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, runpy.run_path(str(ROOT / "scripts/chromium.py"))["NAMES"])))
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as started:
        page = Path(temporary) / "report.html"
        write_page(_material(), page)
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, width, height, scheme, first in _PICTURES_OF_REPORT:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            shown = context.new_page()
            shown.goto(page.as_uri())
            shown.wait_for_selector("html[data-drawn=yes]", state="attached")
            if first:
                shown.evaluate(f"document.getElementById({first!r}).scrollIntoView()")
            shown.screenshot(path=folder / f"report_{name}.png")
            context.close()
        browser.close()


def _material() -> Material:
    """BERT-Large's plan and prediction, and three such steps a tenth slower in place of a run."""
    measured = profile("BERT-Large")
    plan = optimize(measured, SPEC, TrainingSpec(global_batch=BATCH, time_value=TIME_VALUE))
    predicted = predict(plan, measured, SPEC)
    observed = tuple(
        replace(event, step=step, start_s=1.1 * event.start_s + begin_s, end_s=1.1 * event.end_s + begin_s)
        for step, begin_s in enumerate(1.15 * predicted.end_s * step for step in range(3))
        for event in predicted.events
    )
    executed = replace(
        predicted, run="demo", source=Source.EXECUTED, events=observed, samples=dict.fromkeys(range(3), BATCH)
    )
    return Material(plan=plan, profile=measured, spec=SPEC, predicted=predicted, observed=executed)


def main() -> None:
    """Write pictures and tables."""
    draw(PICTURES)
    draw_reports(PICTURES.parent)
    tables = {name: "".join(table()) for name, table in TABLES.items()}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        page.write_text(with_tables(page.read_text(), tables))


def _estimate(
    measured: ModelProfile, *, time_value: float = 0.0, budget_usd: float | None = None, policy: str = "funcpipe"
) -> Estimate:
    training = TrainingSpec(global_batch=BATCH, time_value=time_value, budget_usd=budget_usd)
    plan = optimize(measured, SPEC, training, policy=policy)
    assert plan.estimate is not None
    return plan.estimate


def _cell(estimate: Estimate) -> str:
    return f"{estimate.iteration_s:.1f} s, ${1000 * estimate.cost_usd:.2f}"


if __name__ == "__main__":
    main()
