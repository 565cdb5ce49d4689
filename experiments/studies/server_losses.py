"""Iterations to a loss under asynchrony: predicted from an earlier run, and observed. By a virtual clock, without Ray.

A small network learns handwritten digits by ASP, with several numbers of workers and sizes of a push. The models of a
loss are fitted to whole runs with one order of samples, and predict when runs with another order reach losses that
these had after some of their updates. `own` is fitted to runs with as many workers; `by √n` to runs with the first
number of workers, and takes the published factor √n for the others.
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from experiments.models import digits
from experiments.studies.server_cases import MICRO_BATCH, RUN, job
from funcpipe.client.job import Job
from funcpipe.client.server_job import one_stage, stored_job
from funcpipe.core.loss_model import WeightedLoss
from funcpipe.errors import Infeasible
from funcpipe.model.graph import trace
from funcpipe.parameter_server.loops import Course, History, train_asynchronously
from funcpipe.parameter_server.values import ServerWorker
from funcpipe.provision.fit_loss import LossCurve, fit_weighted
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.server_crew import InTurnCrew
from funcpipe.training.recipe import Recipe

WINDOW = 60
"""Losses of single pushes vary: each counts as the mean of so many."""

PUSHES = (1, 2, 4)
SHARES = (0.3, 0.5, 0.7, 0.85)
EARLIER, LATER = 0, 5  # seeds of the order of samples
BAR = 0.12

Runs = Mapping[tuple[int, int], Sequence[float]]
"""The losses of all updates, by the number of workers and the micro-batches of a push."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    earlier, later = (
        {(n, push): losses(n, push, options, seed) for n in options.workers for push in PUSHES}
        for seed in (EARLIER, LATER)
    )
    fits = {n: fitted(earlier, n) for n in options.workers}
    first = fits[options.workers[0]]
    print("workers  batch    loss  observed       own   error    by √n   error")
    errors: dict[str, list[float]] = {"own": [], "by √n": []}
    for (n, push), found in later.items():
        for share in SHARES:
            target, seen = reached(found, share)
            told = ""
            for name, model in (("own", fits[n]), ("by √n", first)):
                steps = predicted(model, target, n, push)
                errors[name].append(steps / seen - 1)
                told += f" {steps:9.0f} {100 * errors[name][-1]:+6.1f}%"
            print(f"{n:7} {push * MICRO_BATCH:6} {target:7.4f} {seen:9.0f}{told}")
    for name, shares in errors.items():
        within = sum(abs(share) <= BAR for share in shares)
        middle = median(abs(share) for share in shares)
        print(f"{name}: {within} of {len(shares)} within {BAR:.0%}, median error {middle:.1%}")


def losses(workers: int, push: int, options: argparse.Namespace, seed: int) -> list[float]:
    """The loss of each update."""
    storage, made = MemoryStorage(), digits_job(push, options.updates, options.lr, seed)
    machines = [ServerWorker(name=f"w{i}", speed=1.0 + 0.01 * i, push=push) for i in range(workers)]
    history = History()
    crew = InTurnCrew(stored_job(made, storage, RUN), storage, RUN, machines)
    train_asynchronously(crew, Course(batches=made.batches, epochs=made.epochs), history)
    return [record.loss for record in history.pushes][: options.updates]


def digits_job(push: int, updates: int, lr: float, seed: int) -> Job:
    """Train a perceptron of two layers on the digits, for so many epochs that there are enough updates."""
    torch.manual_seed(1)
    perceptron = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    batch, samples = push * MICRO_BATCH, len(digits.train_data())
    graph = trace(perceptron, (torch.zeros(2, 1, 8, 8),))
    return replace(
        job(samples, MICRO_BATCH),
        graph=graph,
        plan=one_stage([layer.name for layer in graph.layers], batch, MICRO_BATCH),
        recipe=Recipe(loss=digits.loss, optimizer=functools.partial(torch.optim.SGD, lr=lr)),
        dataset=digits.train_data,
        samples=samples,
        epochs=-(-updates // (samples // batch)),
        seed=seed,
    )


def fitted(runs: Runs, workers: int) -> WeightedLoss:
    """spotDNN's equation (3), fitted to the runs with so many workers."""
    curves = [
        LossCurve(
            steps=tuple(float(i + 1) for i in range(len(found))),
            losses=tuple(found),
            batch=push * MICRO_BATCH,
            workers=n,
        ).after()
        for (n, push), found in runs.items()
        if n == workers
    ]
    return fit_weighted(curves, heterogeneity=False)


def reached(found: Sequence[float], share: float) -> tuple[float, float]:
    """The loss after a share of all updates, and when it was first as low."""
    smooth = [sum(found[i : i + WINDOW]) / WINDOW for i in range(len(found) - WINDOW)]
    target = smooth[int(share * len(smooth))]
    return target, next(i for i, loss in enumerate(smooth) if loss <= target) + WINDOW / 2


def predicted(model: WeightedLoss, target: float, workers: int, push: int) -> float:
    """How many updates reach the loss."""
    try:
        return model.steps(target, batch=push * MICRO_BATCH, workers=workers, convergence=0.0)
    except Infeasible:
        return float("inf")


if __name__ == "__main__":
    main()
