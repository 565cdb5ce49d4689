"""Makes the pictures and tables of README and docs that follow from the planner alone.

`python scripts/doc_figures.py` writes docs/pictures/*.png anew, and in each page the table between `<!-- table: NAME -->`
and `<!-- end of table -->`. Everything is planned for the specification of AWS Lambda from the profiles in
experiments/profiles, so it comes out alike on every machine: tests compare pages with it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from funcpipe.core import Estimate, ModelProfile, TrainingSpec, read
from funcpipe.errors import Infeasible
from funcpipe.partitioner.analysis.front import pareto_front
from funcpipe.partitioner.analysis.plot import plot_front
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.gantt import draw_one
from funcpipe.report.predict import predict

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
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def profile(model: str) -> ModelProfile:
    """The measured profile of one of MODELS."""
    return read(ModelProfile, PROFILES / f"{MODELS[model]}.json")


def compared() -> Iterator[str]:
    """An iteration of 64 samples on AWS Lambda: one worker or more with the whole model, and our plans."""
    yield "| model | LambdaML | LambdaML-GA | funcpipe, cheapest | funcpipe, an hour worth $3.84 | by LambdaML-GA |\n"
    yield "|---|--:|--:|--:|--:|---|\n"
    for model in MODELS:
        measured = profile(model)
        ga = _estimate(measured, policy="lambdaml-ga")
        ours = _estimate(measured, time_value=TIME_VALUE)
        cells = (
            *(_cell(_estimate(measured, policy="lambdaml")), _cell(ga)),
            *(_cell(_estimate(measured)), _cell(ours), _ratios(ours, ga)),
        )
        yield f"| {model} | {' | '.join(cells)} |\n"


def weighed() -> Iterator[str]:
    """BERT-Large at the four weights of time against money that the paper uses."""
    yield "| an hour saved is worth | s | $ for 1,000 iterations | stages × replicas | functions of (MB) |\n"
    yield "|--:|--:|--:|--:|---|\n"
    for value in (0.0, 3.84, 30.72, 245.76):
        plan = optimize(profile("BERT-Large"), SPEC, TrainingSpec(global_batch=BATCH, time_value=value))
        assert plan.estimate is not None
        sizes = ", ".join(f"{stage.memory_mb:,}" for stage in plan.stages)
        shape = f"{len(plan.stages)} × {plan.replicas}"
        yield f"| ${value:g} | {plan.estimate.iteration_s:.2f} | {1000 * plan.estimate.cost_usd:.2f} | {shape} | {sizes} |\n"


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
    draw_one(predict(plan, measured, SPEC), folder / "timeline.png")


def main() -> None:
    """Write pictures and tables."""
    draw(PICTURES)
    tables = {name: "".join(table()) for name, table in TABLES.items()}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        page.write_text(with_tables(page.read_text(), tables))


def _estimate(measured: ModelProfile, *, time_value: float = 0.0, policy: str = "funcpipe") -> Estimate | None:
    try:
        plan = optimize(measured, SPEC, TrainingSpec(global_batch=BATCH, time_value=time_value), policy=policy)
    except Infeasible:
        return None
    return plan.estimate


def _cell(estimate: Estimate | None) -> str:
    return "does not fit" if estimate is None else f"{estimate.iteration_s:.1f} s, ${1000 * estimate.cost_usd:.2f}"


def _ratios(ours: Estimate | None, other: Estimate | None) -> str:
    if ours is None or other is None:
        return "–"
    return f"{other.iteration_s / ours.iteration_s:.1f}× as fast, {ours.cost_usd / other.cost_usd:.1f}× the dollars"


if __name__ == "__main__":
    main()
