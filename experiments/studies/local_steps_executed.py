"""Replicas that meet after every step, and after eight, executed: their speed, as predicted, and losses.

Two stages of four replicas train a character transformer of 2.7 million parameters on local functions with the links,
latency and processors of AWS Lambda's, of 400 MB each, which two processors hold. It is profiled in such functions
first. A step's time is the mean from the end of one meeting to that of another, by the traces of the functions.

    python -m experiments.studies.local_steps_executed

How much a larger H can gain depends on the share of a step that its exchange takes, which is printed: functions compute
as fast as the processors here, whereas links and latency are imposed. `--micro-batch 2` halves what they compute.

With `--losses`, both are trained for as many steps. Unseen losses are kept in `local_steps_executed.json`, with the
seconds and dollars of the run at which they were reached (figure, table: `experiments.studies.local_losses_report`).
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from experiments.models import characters
from experiments.paper.common import LOCAL
from experiments.paper.executed import small_spec
from funcpipe import FuncPipe
from funcpipe.analysis.compare import compare
from funcpipe.analysis.predict import predict
from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.session import open_site
from funcpipe.core import ModelProfile, Pins, Plan, PlatformSpec, Resource, Trace, Validation
from funcpipe.platforms.catalog import load_spec

KEPT = Path(__file__).with_suffix(".json")
MEMORY_MB, REPLICAS = 400, 4
MICRO_BATCH = 4
BLOCKS = tuple(f"blocks.{number}" for number in range(6))
STEPS = {1: 8, 8: 24}
"""The steps that are timed where replicas meet after so many."""
LEARNING_STEPS, VALIDATED_EVERY, UNSEEN_SAMPLES = 32, 8, 64
"""The steps of each run with losses; validations fall together with meetings, which they would add otherwise."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The unseen loss of the model as it is after some steps, and what the run had taken and cost by then."""

    step: int
    run_s: float
    run_usd: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A run, what a step was predicted to take, and the bill of all in the end."""

    sync_every: int
    global_batch: int
    predicted_s: float
    predicted_usd: float
    bill_usd: float
    points: tuple[Point, ...]


class Points(Callback):
    """The points of a run: a validation is reported after the step that it follows."""

    def __init__(self) -> None:
        self.found: list[Point] = []
        self._last: Progress | None = None

    def on_start(self, run: RunInfo) -> None:
        self.found.clear()

    def on_step(self, progress: Progress) -> None:
        self._last = progress

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        assert self._last is not None
        assert self._last.step == step
        self.found.append(
            Point(step=step, run_s=self._last.elapsed_s, run_usd=self._last.cost_usd, loss=values["val_loss"])
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help="samples of a replica (%(default)s)")
    parser.add_argument("--losses", action="store_true", help="train and validate instead of timing steps")
    parser.add_argument("--output", type=Path, default=KEPT, help="where losses are kept (%(default)s)")
    options = parser.parse_args()
    measured = Measured.here(options.micro_batch)
    if options.losses:
        learned = []
        for sync_every in STEPS:
            learned.append(measured.learn(sync_every))
            write_learned(learned, options.output)
        return
    rows = []
    for sync_every, steps in STEPS.items():
        rows.append(measured.time(sync_every, steps))
        print(json.dumps(rows[-1]), flush=True)
    print(finding(rows))


def pipe() -> FuncPipe:
    """The same weights each time."""
    torch.manual_seed(1)
    model = characters.CharacterTransformer(layers=6, width=192, heads=6, dropout=0.0)
    return FuncPipe(model, loss_fn=characters.loss, optimizer=partial(torch.optim.SGD, lr=0.1), blocks=BLOCKS)


def functions() -> PlatformSpec:
    """Functions of one size."""
    small = small_spec(load_spec("aws-lambda"))
    part = MEMORY_MB / small.sizes[0].memory_mb
    size = replace(
        small.sizes[0],
        name=f"{MEMORY_MB}MB",
        memory_mb=MEMORY_MB,
        vcpu=part * small.sizes[0].vcpu,
        upload_bytes_s=part * small.sizes[0].upload_bytes_s,
        download_bytes_s=part * small.sizes[0].download_bytes_s,
        price_usd_s=part * small.sizes[0].price_usd_s,
    )
    return replace(small, sizes=(size,), max_functions=2 * REPLICAS)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The model as profiled in the functions of `spec`, each replica with `micro_batch` samples in a step."""

    micro_batch: int
    profile: ModelProfile
    spec: PlatformSpec

    @classmethod
    def here(cls, micro_batch: int) -> "Measured":
        inputs, targets = characters.train_data()[:micro_batch]
        with open_site(LOCAL, like=functions()) as site:
            profile = pipe().profile(
                (inputs,), sample_target=targets, micro_batch=micro_batch, repeats=STEPS[1] // 2, on=site
            )
            return cls(micro_batch=micro_batch, profile=profile, spec=site.platform.spec)

    def plan(self, sync_every: int) -> Plan:
        """Two stages of half of the layers each."""
        layers = self.profile.layers
        return pipe().optimize(
            global_batch=REPLICAS * self.micro_batch,
            replicas=REPLICAS,
            sync="pipelined",
            time_value=30.72,
            sync_every=sync_every,
            pins=Pins(cuts=(layers[len(layers) // 2].name,)),
            profile=self.profile,
            spec=self.spec,
        )

    def train(self, plan: Plan, steps: int, **how: Any) -> RunResult:
        data = Subset(characters.train_data(), range(steps * plan.global_batch))
        return pipe().train(
            data, plan=plan, shuffle=False, platform=LOCAL, like=self.spec, prices=self.spec, progress=False, **how
        )

    def time(self, sync_every: int, steps: int) -> dict[str, Any]:
        """What a step takes, and what computing does in one that ends with a meeting, as predicted and observed."""
        plan = self.plan(sync_every)
        result = self.train(plan, steps)
        assert plan.estimate is not None
        lanes = compare(predict(plan, self.profile, self.spec), result.trace).lanes
        computing = [lane for lane in lanes if lane.lane is Resource.COMPUTE]
        return {
            "sync_every": sync_every,
            "plan": f"{len(plan.stages)} x {plan.replicas}",
            "predicted_s": plan.estimate.iteration_s,
            "observed_s": seconds_of_a_step(result.trace, sync_every),
            "predicted_computing_s": sum(lane.predicted.busy_s for lane in computing),
            "observed_computing_s": sum(lane.observed.busy_s for lane in computing),
            "losses": [result.losses[0], result.losses[-1]],
        }

    def learn(self, sync_every: int) -> Learned:
        """Train for as many steps as with each other H, and validate."""
        plan, points = self.plan(sync_every), Points()
        unseen = Subset(characters.test_data(), range(UNSEEN_SAMPLES))
        validation = Validation(data=unseen, every_steps=VALIDATED_EVERY, keep_best=0)
        result = self.train(plan, LEARNING_STEPS, validation=validation, callbacks=[points])
        assert plan.estimate is not None
        return Learned(
            sync_every=sync_every,
            global_batch=plan.global_batch,
            predicted_s=plan.estimate.iteration_s,
            predicted_usd=plan.estimate.cost_usd,
            bill_usd=result.bill.cost_usd,
            points=tuple(points.found),
        )


def seconds_of_a_step(trace: Trace, sync_every: int) -> float:
    """The mean of the steps between the first meeting that was traced and the last one."""
    ends: dict[int, float] = {}
    for event in trace.events:
        ends[event.step] = max(ends.get(event.step, 0.0), event.end_s)
    met = [step for step in sorted(ends) if (step + 1) % sync_every == 0]
    return (ends[met[-1]] - ends[met[0]]) / (met[-1] - met[0])


def finding(rows: Sequence[dict[str, Any]]) -> str:
    """The exchange's share of a step of H = 1, the speed-ups, and by how much steps and computing are off."""
    every, rarely = rows
    step_s, rare_s = every["predicted_s"], rarely["predicted_s"]
    exchange_s = (step_s - rare_s) / (1 - 1 / rarely["sync_every"])
    computing = ", ".join(f"{row['observed_computing_s'] / row['predicted_computing_s'] - 1:+.1%}" for row in rows)
    off = ", ".join(f"{row['observed_s'] / row['predicted_s'] - 1:+.1%}" for row in rows)
    return (
        f"the exchange takes {exchange_s:.3f} s, {exchange_s / step_s:.0%} of a step; predicted "
        f"{step_s / rare_s:.2f} times as fast, observed {every['observed_s'] / rarely['observed_s']:.2f}; "
        f"observed beside predicted: {off}; computing alone: {computing}"
    )


def write_learned(runs: Sequence[Learned], path: Path) -> None:
    """One line for each run."""
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(one)) for one in runs) + "\n]\n")


def read_learned(path: Path) -> Iterator[Learned]:
    for one in json.loads(path.read_text()):
        yield Learned(**one | {"points": tuple(Point(**point) for point in one["points"])})


if __name__ == "__main__":
    main()
