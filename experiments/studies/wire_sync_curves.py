"""Loss curves with sums of gradients in 32, 16 and 8 bits, beside the spread of seeds.

Each model is trained by R replicas in one process, which rounds where functions round
(`tests/e2e/reference.train`, with whose bits the tests compare those of functions). For each seed, training begins
with the same weights and sees the same batches in all formats, so their losses are compared in pairs:

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
from tests.e2e.int8_sums import Int8Sums
from tests.e2e.reference import train

UNSEEN_SAMPLES = 512
EXACT, *ROUNDED = FORMATS = ("fp32", "bf16", "int8")
COLOURS = {"fp32": "tab:blue", "bf16": "tab:orange", "int8": "tab:green"}


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
        micro_batch=1,
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
    parser.add_argument("--go-on", action="store_true", help="keep the runs that the output holds already")
    parser.add_argument("--figure", type=Path, help="draw the curves (needs matplotlib)")
    options = parser.parse_args()
    print("model          parameters  steps  seeds  loss     fp32    ±       format  - fp32    ±        t     seconds")
    before: dict[str, Any] = {}
    if options.go_on and options.output.exists():
        before = json.loads(options.output.read_text())["found"]
    found: dict[str, Any] = dict(before)
    for name in options.models:
        began_s = time.monotonic()
        known = before.get(name, {}).get("runs", [])
        runs: list[dict[str, Run]] = []
        for seed in range(options.seeds):
            one = known[seed] if seed < len(known) else {}
            runs.append(one | all_runs(name, options, seed, [f for f in FORMATS if f not in one]))
            if options.output:
                save(options, found | {name: {"runs": runs + known[seed + 1 :]}})
        parameters = sum(p.numel() for p in TASKS[name].model().parameters())
        rows = differences(runs)
        found[name] = {"parameters": parameters, "runs": runs, "differences": rows}
        for row in rows:
            print(
                f"{name:14} {parameters:10}  {options.steps:5}  {options.seeds:5}  "
                f"{row['loss']:6}  {row['fp32']:6.4f}  {row['fp32_spread']:.4f}  {row['format']:6}  "
                f"{row['difference']:+.5f}  {row['difference_spread']:.5f}  "
                f"{row['t']:+.2f}  {time.monotonic() - began_s:8.0f}",
                flush=True,
            )
        if options.output:
            save(options, found)
    if options.figure:
        draw(found, options.figure)


Run = dict[str, Any]
"""One training: `losses` of all steps, and `unseen`, that on unseen data in the end."""


def all_runs(name: str, options: argparse.Namespace, seed: int, formats: Sequence[str]) -> dict[str, Run]:
    """The runs with `seed` in these formats."""
    settings = [(name, options.steps, seed, options.replicas, f) for f in formats]
    if not settings:
        return {}
    with ProcessPoolExecutor(options.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return dict(zip(formats, pool.map(trained, *zip(*settings, strict=True)), strict=True))


def save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({**vars(options), "found": found}, indent=1, default=str) + "\n")


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
        rounded=torch.bfloat16 if number_format == "bf16" else None,
        int8=sums_in_8_bits(model) if number_format == "int8" else None,
    )
    return {"losses": losses, "unseen": unseen_loss(task, model)}


def sums_in_8_bits(model: nn.Module) -> Int8Sums:
    """The sums of a single stage."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return Int8Sums([range(len(sizes))], sizes)


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


def differences(runs: Sequence[dict[str, Run]]) -> list[dict[str, Any]]:
    """Of the last tenth of the steps, and on unseen data: fp32 over seeds, and what each format adds to it in pairs."""

    def last(run: Run) -> float:
        losses: list[float] = run["losses"]
        return statistics.mean(losses[-max(len(losses) // 10, 1) :])

    rows: list[dict[str, Any]] = []
    for name, value in (("last", last), ("unseen", lambda run: float(run["unseen"]))):
        exact = [value(run[EXACT]) for run in runs]
        for number_format in ROUNDED:
            rounded = [value(run[number_format]) for run in runs]
            pairs = [b - a for a, b in zip(exact, rounded, strict=True)]
            error = spread(pairs) / math.sqrt(len(pairs))
            rows.append(
                {
                    "loss": name,
                    "format": number_format,
                    "fp32": statistics.mean(exact),
                    "fp32_spread": spread(exact),
                    "mean": statistics.mean(rounded),
                    "spread": spread(rounded),
                    "difference": statistics.mean(pairs),
                    "difference_spread": spread(pairs),
                    "t": statistics.mean(pairs) / error if error else math.nan,
                }
            )
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
        for (f, rows), style in zip(curves.items(), ("-", "--", ":"), strict=True):
            steps = range(rows.shape[1])
            above.plot(steps, rows.mean(0), style, color=COLOURS[f], label=f"sums in {f}")
            above.fill_between(steps, rows.amin(0), rows.amax(0), color=COLOURS[f], alpha=0.2)
        deviation = curves[EXACT].std(0) if len(one["runs"]) > 1 else torch.zeros(len(steps))
        below.fill_between(steps, -deviation, deviation, color="0.85", label="± standard deviation of seeds, fp32")
        for f in ROUNDED:
            difference = curves[f] - curves[EXACT]
            below.plot(steps, difference.T, color=COLOURS[f], linewidth=0.4, alpha=0.6)
            below.plot(steps, difference.mean(0), color=COLOURS[f], label=f"{f} − fp32, mean of seeds")
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
