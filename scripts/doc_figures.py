"""Makes the pictures and tables of README and docs that follow from the planner alone.

`python scripts/doc_figures.py` writes docs/pictures/*.png anew, and in each page the table between a line
`<!-- table: NAME -->` and a line `<!-- end of table -->`. Everything is planned for AWS Lambda's specification from the
profiles in experiments/profiles, so it comes out alike on every machine: tests compare pages with it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from funcpipe.analysis.predict import predict
from funcpipe.core import Estimate, ModelProfile, TrainingSpec, read
from funcpipe.partitioner.alternatives import pareto_front, plot_front
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.timeline import draw_one

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
    draw_one(predict(plan, measured, SPEC), folder / "timeline.png")


def main() -> None:
    """Write pictures and tables."""
    draw(PICTURES)
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
