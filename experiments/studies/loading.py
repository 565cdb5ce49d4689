"""What loading adds to a step where computation can hide it, and what it takes in memory.

Samples take 20 ms each, a step has 16 of them, two processes of a DataLoader load them. The model computes for longer
than that. The same model is trained on the same samples without the wait, in turn with the other, several times; for
each pair the ratio of the median iterations, and the seconds on the lanes.

    python -m experiments.studies.loading --runs 5 -o loading.json
"""

import argparse
import functools
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from funcpipe import FuncPipe
from funcpipe.core import Event, OptimizerKind, Plan, Resource, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.testing.plans import even_stages

SAMPLES, MICRO_BATCH, GLOBAL_BATCH, WIDTH = 16 * 12, 4, 16, 256


class Slow:
    """Samples of which each takes `sample_s` to load."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.sample_s)
        return torch.full((WIDTH,), index / SAMPLES), torch.tensor(index % 10)


class Busy(nn.Module):
    """Computes for a while, with few parameters."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = torch.tanh(self.inner(x.repeat(64, 1)))[: x.shape[0]]
        return x


def data(sample_s: float, workers: int) -> DataLoader[Any]:
    """The samples in a DataLoader, as the functions make it."""
    return DataLoader(Slow(sample_s), num_workers=workers)  # type: ignore[arg-type]


def lanes(events: tuple[Event, ...], steps: int) -> dict[str, float]:
    """Busy seconds of a step on the load and compute lanes of the first stage."""
    return {
        lane.value: round(sum(e.busy_s for e in events if e.stage == 0 and e.lane is lane) / steps, 4)
        for lane in (Resource.LOAD, Resource.COMPUTE)
    }


def iteration_s(events: tuple[Event, ...]) -> float:
    """The median time between the ends of two steps, of those in the middle of the run."""
    ends = {step: max(e.end_s for e in events if e.step == step) for step in {e.step for e in events}}
    return median(ends[step] - ends[step - 1] for step in sorted(ends)[2:-1])


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60, help="how long the model computes")
    parser.add_argument("--workers", type=int, default=2, help="processes that load; 0 for a thread")
    parser.add_argument("--sample-ms", type=float, default=20.0)
    parser.add_argument("-o", "--output", default="loading.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(Busy(options.rounds), nn.Linear(WIDTH, 10))
    names = [layer.name for layer in trace(model, (torch.zeros(MICRO_BATCH, WIDTH),)).layers]
    plan = Plan(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.THREE_PHASE,
        wire=Wire.FP32,
        optimizer=OptimizerKind.SGD,
        platform="local",
        stages=even_stages(names, 1),
    )
    found: list[dict[str, Any]] = []
    for _ in range(options.runs):
        pair: dict[str, dict[str, float]] = {}
        for name, sample_s in (("without", 0.0), ("with", options.sample_ms / 1e3)):
            pipe = FuncPipe(model, loss_fn=F.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=0.0))
            made = functools.partial(data, sample_s, options.workers)
            result = pipe.train(made, plan=plan, settings=RunSettings(message_deadline_s=120.0))
            events = result.trace.events
            pair[name] = {"iteration_s": iteration_s(events), **lanes(events, len({e.step for e in events}))}
            memory = max(worker.peak_memory_bytes for worker in result.workers)
            pair[name]["peak_mb"] = round(memory / 2**20)
        found.append({**pair, "ratio": pair["with"]["iteration_s"] / pair["without"]["iteration_s"]})
        print(json.dumps(found[-1]), flush=True)
    ratio = median(run["ratio"] for run in found)
    print(f"median ratio {ratio:.3f}")
    Path(options.output).write_text(json.dumps({"ratio": ratio, "runs": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
