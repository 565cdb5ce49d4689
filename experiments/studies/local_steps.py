"""What meeting every few steps buys, planned and simulated: scaling of replicas, objectives, and the closed form.

Models train with a batch of 256 on AWS Lambda, where an hour is worth 30.72 dollars, with sums in 8 bits and without
local steps as today, or in rounds. Plans have 1 to 16 replicas, or as many as are best. Writes local_steps.json and
local_steps.png.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.paper.planning import PROFILES
from funcpipe.analysis.predict import mean_step_s
from funcpipe.core import ModelProfile, Plan, PlatformSpec, TrainingSpec, Wire, read
from funcpipe.partitioner.local_steps import efficiency
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("resnet101", "bert-large")
BATCH, TIME_VALUE = 256, 30.72
REPLICAS = (1, 2, 4, 8, 16)
ROUNDS = (1, 4, 32)
SUMS = (Wire.FP32, Wire.INT8)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/local_steps"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in options.models:
        for row in of_model(model):
            rows.append(row)
            print(json.dumps(row), flush=True)
    (options.output / "local_steps.json").write_text(json.dumps(rows, indent=1) + "\n")
    for line in findings(rows):
        print(line)
    draw(rows).savefig(options.output / "local_steps.png", dpi=100)


def of_model(model: str) -> Iterator[Row]:
    """The plans of a model: for every number of replicas, and for the best one."""
    profile, spec = read(ModelProfile, PROFILES / f"{model}.json"), load_spec("aws-lambda")
    for sums in SUMS:
        for steps in ROUNDS:
            for replicas in (*((count,) for count in REPLICAS), None):
                if steps == 1 or replicas != (1,):
                    yield _row(profile, spec, sums, steps, replicas)


def _row(profile: ModelProfile, spec: PlatformSpec, sums: Wire, steps: int, replicas: tuple[int, ...] | None) -> Row:
    training = TrainingSpec(
        global_batch=BATCH, time_value=TIME_VALUE, wire_sync=sums, sync_every=steps, replicas=replicas
    )
    began_s = time.process_time()
    plan = optimize(profile, spec, training)
    searched_s = time.process_time() - began_s
    played_s = mean_step_s(plan, profile, spec)
    return {
        "model": profile.model,
        "sums": sums.value,
        "steps": steps,
        "asked": replicas and replicas[0],
        **_of_plan(plan),
        "played_s": played_s,
        "efficiency": efficiency(plan, profile, spec),
        "played_efficiency": mean_step_s(replace(plan, replicas=1), profile, spec) / played_s / plan.replicas,
        "searched_s": round(searched_s, 2),
    }


def _of_plan(plan: Plan) -> Row:
    assert plan.estimate is not None
    assert plan.solver is not None
    return {
        "replicas": plan.replicas,
        "stages": len(plan.stages),
        "schedule": plan.schedule.value,
        "iteration_s": plan.estimate.iteration_s,
        "meeting_s": plan.estimate.meeting_s,
        "cost_usd": plan.estimate.cost_usd,
        "objective_usd": plan.solver.objective,
        "proved": plan.is_proved,
    }


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Efficiency of 16 replicas against 1 of the same stages, objectives against those of today, and the closed form's
    error.
    """
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        today = _one(mine, "fp32", 1, None)
        for sums in (sums.value for sums in SUMS):
            for steps in ROUNDS:
                many, best = _one(mine, sums, steps, REPLICAS[-1]), _one(mine, sums, steps, None)
                ratio = best["objective_usd"] / today["objective_usd"]
                yield (
                    f"{model}, sums in {sums}, {steps} steps: 16 replicas have an efficiency of "
                    f"{many['efficiency']:.0%} planned, {many['played_efficiency']:.0%} played; the best plan has "
                    f"{best['replicas']} replicas and takes {best['iteration_s']:.2f} s, {ratio:.2f} of today's cost"
                )
    for schedule in dict.fromkeys(row["schedule"] for row in rows):
        for steps in ROUNDS:
            mine = [row for row in rows if (row["steps"], row["schedule"]) == (steps, schedule)]
            errors = [row["iteration_s"] / row["played_s"] - 1 for row in mine] or [0.0]
            yield f"closed form, {schedule}, {steps} steps, {len(mine)} plans: {min(errors):+.1%} to {max(errors):+.1%}"


def _one(rows: Sequence[Row], sums: str, steps: int, asked: int | None) -> Row:
    return next(row for row in rows if (row["sums"], row["steps"], row["asked"]) == (sums, steps, asked))


LINES = (
    ("fp32", 1, "every step, 32 bits"),
    ("int8", 1, "every step, 8 bits"),
    ("int8", 4, "every 4th, 8 bits"),
    ("int8", 32, "every 32nd, 8 bits"),
)


def draw(rows: Sequence[Row]) -> "Figure":
    """Samples a second, and efficiency, over replicas; dotted where played."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(4.6 * len(models), 6.4), layout="constrained")
    all_axes = figure.subplots(2, len(models), squeeze=False)
    for column, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        speed, share = all_axes[0][column], all_axes[1][column]
        for number, (sums, steps, label) in enumerate(LINES):
            found = [_one(mine, sums, steps if count > 1 else 1, count) for count in REPLICAS]
            for style, seconds, kind in (("-", "iteration_s", "efficiency"), (":", "played_s", "played_efficiency")):
                how = {
                    "linestyle": style,
                    "marker": ".",
                    "color": f"C{number}",
                    "label": label if style == "-" else None,
                }
                speed.plot(REPLICAS, [BATCH / row[seconds] for row in found], **how)
                share.plot(REPLICAS, [100 * row[kind] for row in found], **how)
        speed.set(ylabel="samples/s", title=f"{model}, batch {BATCH}")
        share.set(ylim=(0, 105), ylabel="efficiency % of one replica")
        for axes in (speed, share):
            axes.set(xscale="log", xlabel="replicas")
            axes.set_xticks(REPLICAS, [str(count) for count in REPLICAS])
            axes.minorticks_off()
        speed.legend(fontsize="small", title="meetings; dotted: played")
    return figure


if __name__ == "__main__":
    main()
