"""Our plan beside every other policy's: predicted seconds and dollars, on the reference models.

Writes planner_policies.json and prints a table for each model and batch, with the share by which a policy is above
ours; `=` marks a plan that is as good.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.planner_profiles import SHAPES, platform, profile
from funcpipe.core import ModelProfile, PlatformSpec, TrainingSpec, read
from funcpipe.errors import Infeasible
from funcpipe.partitioner.catalog import policies
from funcpipe.partitioner.optimize import optimize

BATCHES = (16, 64, 256)
TIME_VALUES = (0.0, 3.84, 30.72, 245.76)
LEFT_OUT = ("exhaustive",)  # for a handful of layers only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/planner"))
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="built-in profiles")
    parser.add_argument("--profile", type=Path, nargs="*", help="measured profiles instead of the built-in ones")
    parser.add_argument("--spec", type=Path, help="the platform of the profiles; AWS Lambda by default")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    spec = read(PlatformSpec, options.spec) if options.spec else platform()
    measured = [read(ModelProfile, path) for path in options.profile or ()]
    profiles = measured or [profile(name, spec) for name in options.models]
    rows = [row for some in profiles for batch in BATCHES for row in compare(some, spec, batch)]
    (options.output / "planner_policies.json").write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)


def compare(measured: ModelProfile, spec: PlatformSpec, batch: int) -> Iterator[dict[str, Any]]:
    for value in TIME_VALUES:
        training = TrainingSpec(global_batch=batch, time_value=value)
        for policy in policies():
            if policy in LEFT_OUT:
                continue
            row = {"model": measured.model, "batch": batch, "time_value": value, "policy": policy}
            try:
                plan = optimize(measured, spec, training, policy=policy)
            except Infeasible as error:
                yield {**row, "infeasible": str(error)}
                continue
            assert plan.estimate is not None
            assert plan.solver is not None
            yield {
                **row,
                "seconds": plan.estimate.iteration_s,
                "dollars": plan.estimate.cost_usd,
                "objective": plan.solver.objective,
                "replicas": plan.replicas,
                "memory_mb": [stage.memory_mb for stage in plan.stages],
                "solve_s": plan.solver.solve_s,
            }


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, width=140)
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        table = Table(
            "policy",
            *(f"{value:g} $/h" for value in TIME_VALUES),
            title=f"{model}, batch {batch}: s, m$, above ours by",
        )
        for policy in dict.fromkeys(row["policy"] for row in here):
            table.add_row(policy, *(_cell(row, here) for row in here if row["policy"] == policy))
        console.print(table)


def _cell(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if "infeasible" in row:
        return "no plan"
    ours = next(r for r in rows if r["policy"] == "funcpipe" and r["time_value"] == row["time_value"])
    worse = row["objective"] / ours["objective"] - 1
    mark = "" if row["policy"] == "funcpipe" else " =" if abs(worse) < 1e-9 else f" {worse:+.1%}"
    return f"{row['seconds']:.1f} s {1000 * row['dollars']:.2f} m${mark}"


if __name__ == "__main__":
    main()
