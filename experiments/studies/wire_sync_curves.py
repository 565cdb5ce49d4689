"""Loss curves with sums of gradients in 32 and in 16 bits, beside the spread of seeds.

Each model is trained by R replicas in one process, which rounds where functions round
(`tests/e2e/reference.train`, with whose bits the tests compare those of functions). For each seed, training begins
with the same weights and sees the same batches in both formats, so their losses are compared in pairs:

    python -m experiments.studies.wire_sync_curves --steps 500 --seeds 5 --output out/sync.json --figure out/sync.png

Printed for each model: the mean and the standard deviation over seeds of the last losses in fp32, and the mean and the
standard deviation of the pairs' differences. `last` is the mean training loss of the last tenth of the steps, `unseen`
the loss on held-out data in the end. `t` is the mean difference by its standard error: between -2 and 2 it may well be
chance.
"""

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.models import characters
from tests.e2e.reference import train

UNSEEN_SAMPLES = 512
FORMATS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Task:
    """A model that learns: micro-batches of `micro_batch` samples, `each` of them for each replica in a step."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Callable[[], TensorDataset]
    unseen: Callable[[], TensorDataset]
    micro_batch: int
    each: int


def of_module(name: str, **options: Any) -> Task:
    module = importlib.import_module(f"experiments.models.{name}")
    given: dict[str, Any] = {"model": module.model, "loss": module.loss, "optimizer": module.optimizer}
    return Task(**{**given, **options}, data=module.train_data, unseen=module.test_data)


TASKS = {
    "digits": of_module("digits", micro_batch=16, each=2),
    "characters": of_module("characters", micro_batch=16, each=1),
    "transformer": of_module(
        "characters",
        model=partial(characters.CharacterTransformer, layers=6, width=384, heads=6),  # 10.7 M parameters
        optimizer=partial(torch.optim.AdamW, lr=5e-4, weight_decay=0.01),
        micro_batch=8,
        each=1,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, each on one processor")
    parser.add_argument("--output", type=Path, help="write curves and figures as JSON")
    parser.add_argument("--figure", type=Path, help="draw the curves (needs matplotlib)")
    options = parser.parse_args()
    print("model          parameters  steps  seeds  loss     fp32    ±        bf16 - fp32  ±         t     seconds")
    found: dict[str, Any] = {}
    for name in options.models:
        began_s = time.monotonic()
        runs = all_runs(name, options.steps, options.seeds, options.replicas, options.jobs)
        parameters = sum(p.numel() for p in TASKS[name].model().parameters())
        rows = differences(runs)
        found[name] = {"parameters": parameters, "runs": runs, "differences": rows}
        for loss, row in rows.items():
            print(
                f"{name:14} {parameters:10}  {options.steps:5}  {options.seeds:5}  {loss:6}  {row['fp32']:6.4f}  "
                f"{row['fp32_spread']:.4f}   {row['difference']:+.5f}     {row['difference_spread']:.5f}  "
                f"{row['t']:+.2f}  {time.monotonic() - began_s:8.0f}",
                flush=True,
            )
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({**vars(options), "found": found}, indent=1, default=str) + "\n")
    if options.figure:
        draw(found, options.figure)


Run = dict[str, Any]
"""One training: `losses` of all steps, and `unseen`, that on unseen data in the end."""


def all_runs(name: str, steps: int, seeds: int, replicas: int, jobs: int) -> list[dict[str, Run]]:
    """For each seed the run in each format."""
    settings = [(name, steps, seed, replicas, f) for seed in range(seeds) for f in FORMATS]
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        runs = iter(list(pool.map(trained, *zip(*settings, strict=True))))
    return [{f: next(runs) for f in FORMATS} for _ in range(seeds)]


def trained(name: str, steps: int, seed: int, replicas: int, number_format: str) -> Run:
    task = TASKS[name]
    torch.manual_seed(seed)
    model = task.model()
    losses = train(
        model,
        task.data(),
        loss_fn=task.loss,
        optimizer=task.optimizer,
        steps=list(batches(task, steps, seed, replicas)),
        seed=seed,
        replicas=replicas,
        rounded=FORMATS[number_format],
    )
    return {"losses": losses, "unseen": unseen_loss(task, model)}


def batches(task: Task, steps: int, seed: int, replicas: int) -> Iterator[list[list[int]]]:
    """The samples of the micro-batches of each step, in an order that depends on the seed alone."""
    samples = len(task.data())
    generator = torch.Generator().manual_seed(seed)
    size = task.micro_batch * task.each * replicas
    order: list[int] = []
    for _ in range(steps):
        while len(order) < size:
            order += torch.randperm(samples, generator=generator).tolist()
        yield [order[first : first + task.micro_batch] for first in range(0, size, task.micro_batch)]
        del order[:size]


def unseen_loss(task: Task, model: nn.Module) -> float:
    inputs, targets = (tensor[:UNSEEN_SAMPLES] for tensor in task.unseen().tensors)
    model.eval()
    with torch.no_grad():
        return float(task.loss(model(inputs), targets))


def differences(runs: Sequence[dict[str, Run]]) -> dict[str, dict[str, float]]:
    """Of the last tenth of the steps, and on unseen data: fp32 over seeds, and what bf16 adds to it in pairs."""

    def last(run: Run) -> float:
        losses: list[float] = run["losses"]
        return statistics.mean(losses[-max(len(losses) // 10, 1) :])

    rows = {}
    for name, value in (("last", last), ("unseen", lambda run: float(run["unseen"]))):
        exact, rounded = ([value(run[f]) for run in runs] for f in FORMATS)
        pairs = [b - a for a, b in zip(exact, rounded, strict=True)]
        error = spread(pairs) / math.sqrt(len(pairs))
        rows[name] = {
            "fp32": statistics.mean(exact),
            "fp32_spread": spread(exact),
            "bf16": statistics.mean(rounded),
            "bf16_spread": spread(rounded),
            "difference": statistics.mean(pairs),
            "difference_spread": spread(pairs),
            "t": statistics.mean(pairs) / error if error else math.nan,
        }
    return rows


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def draw(found: dict[str, Any], path: Path) -> None:
    """For each model the mean curve of each format, between the least and the greatest of all seeds; below them the
    pairs' difference beside the spread of the seeds in fp32.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(5 * len(found), 6.5), squeeze=False, sharex="col")
    for (name, one), above, below in zip(found.items(), axes[0], axes[1], strict=True):
        curves = {f: torch.tensor([smooth(run[f]["losses"]) for run in one["runs"]]) for f in FORMATS}
        for (f, rows), colour, style in zip(curves.items(), ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
            steps = range(rows.shape[1])
            above.plot(steps, rows.mean(0), style, color=colour, label=f"sums in {f}")
            above.fill_between(steps, rows.amin(0), rows.amax(0), color=colour, alpha=0.2)
        difference = curves["bf16"] - curves["fp32"]
        deviation = curves["fp32"].std(0) if len(one["runs"]) > 1 else torch.zeros(len(steps))
        below.fill_between(steps, -deviation, deviation, color="0.85", label="± standard deviation of seeds, fp32")
        below.plot(steps, difference.T, color="tab:orange", linewidth=0.7)
        below.plot(steps, difference.mean(0), color="black", label="bf16 − fp32, mean of seeds")
        above.set(title=f"{name}, {one['parameters'] / 1e6:.1f} M parameters", ylabel="training loss", yscale="log")
        below.set(xlabel="step", ylabel="difference of losses")
        above.legend()
        below.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def smooth(losses: Sequence[float]) -> list[float]:
    """Each the mean of itself and those before it, of a fortieth of all."""
    width = max(len(losses) // 40, 1)
    return [statistics.fmean(losses[max(i + 1 - width, 0) : i + 1]) for i in range(len(losses))]


if __name__ == "__main__":
    main()
