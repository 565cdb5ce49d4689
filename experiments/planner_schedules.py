"""What it gains to choose the schedule, recomputation and the wire's number format with the plan.

The paper's plans run GPipe, send 32-bit tensors, keep all activations and synchronise by its pipelined scatter-reduce.
For its best plan on each reference model the table has the cheapest plan that takes no longer, and the fastest that
costs no more, when one of the four may be chosen, and when all may. Sixteen-bit tensors on the wire round what they
carry; the rest changes no number.
Writes planner_schedules.json.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.planner_profiles import SHAPES, platform, profile
from funcpipe.core import (
    Estimate,
    ModelProfile,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Sync,
    TrainingSpec,
    Wire,
    read,
)
from funcpipe.partitioner.optimize import optimize

BATCHES = (64, 256)
TIME_VALUES = (0.0, 3.84, 30.72, 245.76)
FREE: dict[str, dict[str, Any]] = {
    "schedule": {"schedule": None},
    "recompute": {"recompute": Recompute.AUTO},
    "wire": {"wire": Wire.BF16},
    "sync": {"sync": None},
    "all": {"schedule": None, "recompute": Recompute.AUTO, "wire": Wire.BF16, "sync": None},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/planner"))
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="built-in profiles")
    parser.add_argument("--profile", type=Path, nargs="*", help="measured profiles instead of the built-in ones")
    parser.add_argument("--spec", type=Path, help="the platform of the profiles; AWS Lambda by default")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    spec = read(PlatformSpec, options.spec) if options.spec else platform()
    profiles = [read(ModelProfile, path) for path in options.profile or ()]
    rows: list[dict[str, Any]] = []
    for measured in profiles or [profile(name, spec) for name in options.models]:
        found = [row for batch in BATCHES for row in compare(measured, spec, batch)]
        show(found)
        rows += found
        (options.output / "planner_schedules.json").write_text(json.dumps(rows, indent=1) + "\n")


def compare(measured: ModelProfile, spec: PlatformSpec, batch: int) -> Iterator[dict[str, Any]]:
    """For each value of time the paper's plan, and what the freedoms gain over it."""
    for value in TIME_VALUES:
        fixed = TrainingSpec(
            global_batch=batch,
            time_value=value,
            schedule=ScheduleKind.GPIPE,
            sync=Sync.PIPELINED,
            recompute=Recompute.NEVER,
        )
        paper = estimate_of(optimize(measured, spec, fixed))
        row = {"model": measured.model, "batch": batch, "time_value": value}
        row |= {"seconds": paper.iteration_s, "dollars": paper.cost_usd}
        for name, freedom in FREE.items():
            free = replace(fixed, time_value=0.0, **freedom)
            cheap = optimize(measured, spec, replace(free, deadline_s=paper.iteration_s))
            fast = optimize(measured, spec, replace(free, budget_usd=paper.cost_usd))
            row[name] = {
                "cost": estimate_of(cheap).cost_usd / paper.cost_usd,
                "time": estimate_of(fast).iteration_s / paper.iteration_s,
                "cheapest": shape(cheap),
                "fastest": shape(fast),
            }
        yield row


def estimate_of(plan: Plan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


def shape(plan: Plan) -> str:
    again = sum(stage.recompute for stage in plan.stages)
    recompute = f", {again} recompute" if again else ""
    return f"{len(plan.stages)} x {plan.replicas} {plan.schedule.value}{recompute}"


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, width=190)
    table = Table(
        "model",
        "batch",
        "$/h",
        "GPipe, fp32",
        *FREE,
        "cheapest of all",
        "fastest of all",
        title="cost at equal time, time at equal cost, when what the column names is chosen with the plan",
    )
    for row in rows:
        gains = [f"{row[name]['cost'] - 1:+.1%} $ {row[name]['time'] - 1:+.1%} s" for name in FREE]
        paper = f"{row['seconds']:.1f} s {1000 * row['dollars']:.1f} m$"
        best = row["all"]["cheapest"], row["all"]["fastest"]
        table.add_row(row["model"], str(row["batch"]), f"{row['time_value']:g}", paper, *gains, *best)
    console.print(table)


if __name__ == "__main__":
    main()
