"""Iterations and peak memory of real training on this machine, beside what was predicted, schedule by schedule.

No plan has more functions than this machine has processors to spare: two. The profile is measured in the same run.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.cuts import even_cuts
from experiments.models.digits import Residual, optimizer
from funcpipe import FuncPipe
from funcpipe.core import MB, ModelProfile, Plan, Recompute, ScheduleKind
from funcpipe.partitioner.cost import evaluate
from funcpipe.partitioner.pins import Pins
from funcpipe.platforms.catalog import load_spec
from funcpipe.report import compare

MICRO_BATCH, MICRO_BATCHES, WIDTH, BLOCKS, PIXELS = 8, 8, 32, 12, 32
TIME_BAR, MEMORY_BAR = 0.15, 0.10


def model() -> nn.Module:
    """Residual blocks, all alike."""
    blocks = (Residual(WIDTH, WIDTH) for _ in range(BLOCKS))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
    return nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), *blocks, *head)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    count = MICRO_BATCH * MICRO_BATCHES
    return [(torch.randn(1, PIXELS, PIXELS, generator=generator), torch.tensor(i % 10)) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pipe = FuncPipe(model(), loss_fn=F.cross_entropy, optimizer=optimizer)
    sample = torch.zeros(MICRO_BATCH, 1, PIXELS, PIXELS)
    profile = pipe.profile(
        sample, platform="local", micro_batch=MICRO_BATCH, sample_target=torch.arange(MICRO_BATCH) % 10
    )
    print(f"{'plan':34} {'predicted s':>11} {'observed s':>10} {'ratio':>6}   stage: predicted MB, observed MB, ratio")
    rows, spec = [], load_spec("local")
    for name, plan in plans(pipe, profile):
        result = pipe.train(data, epochs=options.steps, plan=plan)
        comparison = compare(pipe.simulate(plan), result.trace)
        peaks = [
            max(r.peak_memory_bytes for r in result.workers if r.worker.startswith(f"s{s}."))
            for s in range(len(plan.stages))
        ]
        needs = [stage.memory_bytes for stage in evaluate(plan, profile, spec).stages]
        rows.append(row(name, comparison.predicted_iteration_s, comparison.observed_iteration_s, needs, peaks))
    times = [abs(found["observed_s"] / found["predicted_s"] - 1) for found in rows]
    memories = [abs(ratio - 1) for found in rows for ratio in found["memory_ratios"]]
    print(f"largest difference in time {max(times):.1%}, bar {TIME_BAR:.0%}")
    print(f"largest difference in memory {max(memories):.1%}, bar {MEMORY_BAR:.0%}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def plans(pipe: FuncPipe, profile: ModelProfile) -> Iterator[tuple[str, Plan]]:
    batch = MICRO_BATCH * MICRO_BATCHES
    for stages, replicas in ((1, 1), (1, 2)):
        pins = Pins(cuts=even_cuts(profile, stages), replicas=(replicas,))
        yield f"{stages} x {replicas} gpipe", pipe.optimize(global_batch=batch, pins=pins, recompute=Recompute.NEVER)
    pins = Pins(cuts=even_cuts(profile, 2), replicas=(1,))
    base = pipe.optimize(global_batch=batch, pins=pins, recompute=Recompute.NEVER)
    for recompute, schedule in itertools.product((False, True), ScheduleKind):
        cut = tuple(replace(stage, recompute=recompute) for stage in base.stages)
        name = f"2 x 1 {schedule.value}{' recompute' if recompute else ''}"
        yield name, replace(base, schedule=schedule, stages=cut)


def row(name: str, predicted_s: float, observed_s: float, needs: list[int], peaks: list[int]) -> dict[str, Any]:
    memory = "  ".join(
        f"{need / MB:6.0f} {peak / MB:6.0f} {peak / need:5.2f}" for need, peak in zip(needs, peaks, strict=True)
    )
    print(f"{name:34} {predicted_s:11.4f} {observed_s:10.4f} {observed_s / predicted_s:6.3f}   {memory}", flush=True)
    return {
        "plan": name,
        "predicted_s": predicted_s,
        "observed_s": observed_s,
        "predicted_bytes": needs,
        "peak_bytes": peaks,
        "memory_ratios": [peak / need for need, peak in zip(needs, peaks, strict=True)],
    }


if __name__ == "__main__":
    main()
