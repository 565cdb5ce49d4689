"""What a step costs when functions differ in speed and some die: planned without, and simulated with it.

Each function is slower or faster than planned by a log-normal number of mean 1, for all of the step, and each task by
another one. Each function dies with a probability of one in a thousand, at any moment of the step, and its successor
repeats the step. A step with n functions has no death with probability 0.999^n; its mean is that of steps without
deaths and of steps with at least one, of which several are played.

    python -m experiments.studies.stragglers --functions 64 512 --seeds 8 --json stragglers.json
    python -m experiments.studies.stragglers --functions --json stragglers.json --figure stragglers.png
"""

import argparse
import itertools
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from experiments.paper.planning import profile_of
from funcpipe.analysis.predict import forecast
from funcpipe.core import ModelProfile, Plan, PlatformSpec, ScheduleKind, Stage, Streams, Sync, Wire
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.simulator.disturbances import UNDISTURBED, Disturbances, Failure, log_normal

STAGES = 8
NOISE, DEATH = 0.05, 0.001
MICRO_BATCHES_EACH = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, nargs="*", default=[64, 512, 4096], help="none to draw what is kept")
    parser.add_argument("--seeds", type=int, default=5, help="steps that are played for each row")
    parser.add_argument("--json", type=Path, help="keep rows in this file, and those of other numbers of functions")
    parser.add_argument("--figure", type=Path, help="draw all rows into this file (needs matplotlib)")
    options = parser.parse_args()
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    for functions in options.functions:
        row = measured(functions, options.seeds)
        print(json.dumps(row), flush=True)
        rows = sorted(
            [row, *(old for old in rows if old["functions"] != functions)], key=lambda each: each["functions"]
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.figure:
        draw(rows, options.figure)


def plan_of(functions: int, profile: ModelProfile, spec: PlatformSpec) -> Plan:
    """Eight equal stages of the largest size, summed by streams in one round."""
    layers, size = len(profile.layers), spec.sizes[-1]
    cuts = [layers * i // STAGES for i in range(STAGES + 1)]
    replicas = functions // STAGES
    return Plan(
        global_batch=MICRO_BATCHES_EACH * replicas * profile.micro_batch,
        micro_batch=profile.micro_batch,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.STREAMED,
        streams=Streams(1, 1, 1),
        wire=Wire.FP32,
        stages=tuple(
            Stage(first=first, stop=stop, size=size.name, memory_mb=size.memory_mb)
            for first, stop in itertools.pairwise(cuts)
        ),
    )


def measured(functions: int, seeds: int) -> dict[str, Any]:
    """Play a step as planned, with noise, and with deaths too."""
    spec = load_spec("aws-lambda").without_request_limits()
    profile = profile_of("resnet101", spec.name)
    plan = plan_of(functions, profile, spec)
    played = [step(plan, profile, spec, UNDISTURBED)]
    even_s = played[0]["seconds"]
    noisy = [step(plan, profile, spec, noise(plan, seed)) for seed in range(seeds)]
    with_deaths = [
        step(plan, profile, spec, replace(noise(plan, seed), failures=deaths(plan, spec, even_s, seed)))
        for seed in range(seeds)
    ]
    none = (1 - DEATH) ** functions
    noisy_s, died_s = (mean(each["seconds"] for each in steps) for steps in (noisy, with_deaths))
    expected_s = none * noisy_s + (1 - none) * died_s
    usd_in = evaluate(plan, profile, spec).usd_in
    return {
        "functions": functions,
        "tasks": played[0]["tasks"],
        "without a death": none,
        "seconds": {"as planned": even_s, "noisy": noisy_s, "with a death": died_s, "mean": expected_s},
        "dollars": {"as planned": usd_in(even_s), "noisy": usd_in(noisy_s), "mean": usd_in(expected_s)},
        "played": {"as planned": played, "noisy": noisy, "with a death": with_deaths},
    }


def step(plan: Plan, profile: ModelProfile, spec: PlatformSpec, found: Disturbances) -> dict[str, Any]:
    """The seconds of a step, and what it took to play it."""
    began_s = time.process_time()
    timeline = forecast(plan, profile, spec, disturbances=found)
    return {
        "seconds": timeline.duration_s,
        "deaths": len(found.failures),
        "tasks": len(timeline.tasks),
        "processor seconds": round(time.process_time() - began_s, 1),
        "most MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def noise(plan: Plan, seed: int) -> Disturbances:
    """Each function has a speed of its own, and each task too."""
    workers = list(itertools.product(range(len(plan.stages)), range(plan.replicas)))
    factors = log_normal(np.random.default_rng((seed, 1)), np.full(len(workers), NOISE))
    return Disturbances(
        compute_jitter=NOISE,
        transfer_jitter=NOISE,
        stragglers=dict(zip(workers, factors.tolist(), strict=True)),
        seed=seed,
    )


def deaths(plan: Plan, spec: PlatformSpec, even_s: float, seed: int) -> tuple[Failure, ...]:
    """The deaths of a step that has at least one; each function is replaced after a cold start."""
    draw, count = np.random.default_rng((seed, 2)), 0
    while not count:
        count = draw.binomial(plan.workers, DEATH)
    numbers = draw.choice(plan.workers, count, replace=False).tolist()
    return tuple(
        Failure(worker=divmod(number, plan.replicas), at_s=at_s, restart_s=spec.cold_start_s)
        for number, at_s in zip(numbers, draw.uniform(0, even_s, count).tolist(), strict=True)
    )


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw seconds over the number of functions, and what they are made of."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    places = np.arange(len(rows))
    for offset, (name, colour) in enumerate(
        {"as planned": "tab:gray", "noisy": "tab:blue", "mean": "tab:orange", "with a death": "tab:red"}.items()
    ):
        heights = [row["seconds"][name] for row in rows]
        bars = axes.bar(places + 0.2 * (offset - 1.5), heights, 0.2, label=name, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(places, [f"{row['functions']:,} functions" for row in rows])
    axes.set_ylabel("seconds of a step")
    axes.set_title("Functions 5 % noisy, one in a thousand dies in a step; simulated", fontsize=9)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
