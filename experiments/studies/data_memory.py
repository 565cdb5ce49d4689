"""Memory and time of functions that hold data: what a plan says, beside what functions with Lambda's limits take.

A small network trains on the same samples, of 1 MB each: some; many that lie in memory as tensors; and as many that a
factory makes in each function. Loading a sample takes nothing, or 10 ms. In the first epoch functions read tensors in
memory from the storage: plans do not count that.

    python -m experiments.studies.data_memory
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.studies.loading import iteration_s
from funcpipe import FuncPipe
from funcpipe.training.data_source import Data

WIDTH, HIDDEN, CLASSES = 1 << 18, 8, 10
GLOBAL_BATCH, MICRO_BATCH = 16, 4


class Slow:
    """Samples in memory, of which each takes `sample_s` to load."""

    def __init__(self, samples: int, sample_s: float) -> None:
        self._samples = tensors(samples)
        self._sample_s = sample_s

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(self._sample_s)
        sample: tuple[Tensor, ...] = self._samples[index]
        return sample


def tensors(samples: int) -> TensorDataset:
    """So many samples of 1 MB."""
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, WIDTH, generator=draw), torch.arange(samples) % CLASSES)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def row(name: str, data: Data, replicas: int) -> dict[str, Any]:
    """Plan for `data`, train on it for one epoch and for more, and compare."""
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
    pipe = FuncPipe(model(), loss_fn=nn.functional.cross_entropy, optimizer=optimizer)
    pipe.profile((torch.zeros(MICRO_BATCH, WIDTH),), micro_batch=MICRO_BATCH, dataset=data)
    plan = pipe.optimize(global_batch=GLOBAL_BATCH, replicas=replicas)
    first, more = (pipe.train(data, epochs=epochs, plan=plan, like="aws-lambda", progress=False) for epochs in (1, 4))
    assert plan.estimate is not None
    planned = max(stage.memory_bytes for stage in plan.estimate.stages)
    return {
        "data": name,
        "stages": len(plan.stages),
        "replicas": plan.replicas,
        "function MB": max(stage.memory_mb for stage in plan.stages),
        "data planned MB": max(stage.data_bytes for stage in plan.estimate.stages) / 1e6,
        "planned MB": planned / 1e6,
        "measured MB": max(report.peak_memory_bytes for report in more.workers) / 1e6,
        "planned s": plan.estimate.iteration_s,
        "first epoch s": iteration_s(first.trace.events),
        "later epochs s": iteration_s(more.trace.events),  # a trace is of the last steps
    }


def width(column: str) -> int:
    return 38 if column == "data" else 15


def text(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=264, help="of 1 MB each, where there are many")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    few, many = 6 * GLOBAL_BATCH, options.samples
    rows = []
    for name, data in (
        (f"{few} MB of tensors", tensors(few)),
        (f"{many} MB of tensors", tensors(many)),
        (f"{many} MB by a factory", functools.partial(tensors, many)),
        (f"{many} MB by a factory, 10 ms a sample", functools.partial(Slow, many, 0.01)),
    ):
        rows.append(row(name, data, options.replicas))
        if len(rows) == 1:
            print(*(f"{key:>{width(key)}}" for key in rows[0]))
        print(*(f"{text(value):>{width(key)}}" for key, value in rows[-1].items()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
