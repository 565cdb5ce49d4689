"""Compares iterations and peak memory of real training on this machine with predictions, for each schedule.

No plan has more functions than this machine has processors to spare: two. The speed of a shared machine drifts within
seconds by more than what is measured here. So each run is predicted twice, from a profile measured just before and from
one measured just after, in a function like those that train, and the mean of both counts. All plans are run many times
by turns. The ratio given is the median; the ratio of the sums includes whatever delayed a single run.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.cuts import even_cuts
from experiments.models.digits import Residual, optimizer
from funcpipe import FuncPipe
from funcpipe.client.site import Site, open_site
from funcpipe.core import MB, ModelProfile, Pins, Plan, Recompute, ScheduleKind
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.report.compare import compare

MICRO_BATCH, MICRO_BATCHES, WIDTH, BLOCKS, PIXELS = 8, 8, 32, 12, 32
REPEATS = 40
TIME_BAR, MEMORY_BAR = 0.15, 0.10


def model() -> nn.Module:
    """Residual blocks, all alike."""
    blocks = (Residual(WIDTH, WIDTH) for _ in range(BLOCKS))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
    return nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), *blocks, *head)


def sample() -> tuple[Tensor, ...]:
    return (torch.zeros(MICRO_BATCH, 1, PIXELS, PIXELS),)


def target() -> Tensor:
    return torch.arange(MICRO_BATCH) % 10


loss = F.cross_entropy


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    count = MICRO_BATCH * MICRO_BATCHES
    return [(torch.randn(1, PIXELS, PIXELS, generator=generator), torch.tensor(i % 10)) for i in range(count)]


@dataclass
class Row:
    """Predictions and observations of a plan, by round; bytes by stage."""

    plan: Plan
    needs: list[int]
    predicted_s: list[float] = field(default_factory=list)
    observed_s: list[float] = field(default_factory=list)
    peaks: list[list[int]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Observed divided by predicted seconds of each round, ascending."""
        return sorted(o / p for o, p in zip(self.observed_s, self.predicted_s, strict=True))

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    @property
    def ratio_of_sums(self) -> float:
        """That of all rounds together."""
        return sum(self.observed_s) / sum(self.predicted_s)

    @property
    def peak_bytes(self) -> list[float]:
        """The median of each stage's peaks."""
        return [statistics.median(peaks) for peaks in zip(*self.peaks, strict=True)]

    @property
    def memory_ratios(self) -> list[float]:
        """Observed divided by predicted bytes of each stage."""
        return [peak / need for peak, need in zip(self.peak_bytes, self.needs, strict=True)]

    def line(self) -> str:
        """The means, and the range of the ratios."""
        times = f"{statistics.fmean(self.predicted_s):11.4f} {statistics.fmean(self.observed_s):10.4f}"
        ratios = f"{self.ratio:6.3f} ({self.ratios[0]:.2f}-{self.ratios[-1]:.2f}) {self.ratio_of_sums:6.3f}"
        stages = zip(self.needs, self.peak_bytes, self.memory_ratios, strict=True)
        memory = "  ".join(f"{need / MB:6.0f} {peak / MB:6.0f} {ratio:5.2f}" for need, peak, ratio in stages)
        return f"{times} {ratios}   {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    pipe = FuncPipe(model(), loss_fn=loss, optimizer=optimizer)
    rows: dict[str, Row] = {}
    with open_site() as site:
        profile = measure(pipe, site)
        for name, plan in plans(pipe, profile):
            needs = [stage.memory_bytes for stage in evaluate(plan, profile, site.platform.spec).stages]
            rows[name] = Row(plan, needs)
        for number in range(options.rounds):
            for row in rows.values():
                run(pipe, row, site, options.steps)
            print(f"round {number + 1}:", *(f"{row.ratio:.3f}" for row in rows.values()), flush=True)
    head = f"{'predicted s':>11} {'observed s':>10} {'ratio':>6} {'(range)':11} {'sums':>6}"
    print(f"{'plan':28} {head}   stage: predicted MB, observed MB, ratio")
    for name, row in rows.items():
        print(f"{name:28} {row.line()}")
    times = [abs(row.ratio - 1) for row in rows.values()]
    memories = [abs(ratio - 1) for row in rows.values() for ratio in row.memory_ratios]
    print(f"largest difference in time {max(times):.1%}, bar {TIME_BAR:.0%}")
    print(f"largest difference in memory {max(memories):.1%}, bar {MEMORY_BAR:.0%}")
    if options.output:
        figures = {name: {k: v for k, v in vars(row).items() if k != "plan"} for name, row in rows.items()}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def measure(pipe: FuncPipe, site: Site) -> ModelProfile:
    """The profile of this moment."""
    return pipe.profile(*sample(), micro_batch=MICRO_BATCH, sample_target=target(), repeats=REPEATS, on=site)


def run(pipe: FuncPipe, row: Row, site: Site, steps: int) -> None:
    """Train by a plan once more; the profile in `pipe` was measured just before."""
    before = pipe.simulate(row.plan)
    result = pipe.train(data, epochs=steps, plan=row.plan)
    measure(pipe, site)
    reports = [compare(predicted, result.trace) for predicted in (before, pipe.simulate(row.plan))]
    row.predicted_s.append(statistics.fmean(report.predicted_iteration_s for report in reports))
    row.observed_s.append(reports[0].observed_iteration_s)
    workers = [[r for r in result.workers if r.worker.startswith(f"s{s}.")] for s in range(len(row.plan.stages))]
    row.peaks.append([max(worker.peak_memory_bytes for worker in stage) for stage in workers])


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


if __name__ == "__main__":
    main()
