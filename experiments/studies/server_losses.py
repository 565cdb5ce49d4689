"""Iterations to a loss under asynchrony: predicted from a short run, and observed. By a virtual clock, without Ray.

Fits the loss of the first part of a run with so many workers and predicts when later, lower losses are reached: by the
same workers, and, with the √n of the model, by other numbers of them.
"""

import argparse
import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from experiments.studies.server_cases import MICRO_BATCH, RUN, job
from funcpipe.client.job import Job
from funcpipe.client.server_job import one_stage, stored_job
from funcpipe.core.loss_model import InverseLoss
from funcpipe.errors import Infeasible
from funcpipe.model.graph import trace
from funcpipe.parameter_server.loops import Course, History, train_asynchronously
from funcpipe.parameter_server.values import ServerWorker
from funcpipe.provision.fit_loss import LossCurve, fit_inverse
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.server_crew import InTurnCrew
from funcpipe.training.recipe import Recipe

WINDOW = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shown", type=float, default=0.5, help="the share of the first run that is fitted")
    parser.add_argument("--problem", choices=["margin", "curve"], default="margin")
    options = parser.parse_args()
    curves = {count: losses(count, options.pushes, options.problem) for count in options.workers}
    first = options.workers[0]
    shown = curves[first][: round(options.shown * options.pushes)]
    model = fitted(shown, first)
    print(f"fitted to the first {len(shown)} of {first} workers: scale {model.scale:.2f}, floor {model.floor:.4f}")
    print(f"{'workers':>8} {'loss':>8} {'observed':>9} {'by √n':>10} {'error':>7} {'own fit':>10} {'error':>7}")
    for count, found in curves.items():
        smooth = smoothed(found)
        own = fitted(found[: round(options.shown * options.pushes)], count)
        for share in (0.7, 0.85):
            target = smooth[round(share * len(smooth))]
            seen = next(i for i, loss in enumerate(smooth) if loss <= target) + WINDOW / 2
            texts = [_predicted(one, target, count, seen) for one in (model, own)]
            told = " ".join(f"{steps:>10} {error:>7}" for steps, error in texts)
            print(f"{count:8} {target:8.4f} {seen:9.0f} {told}")


class Margin:
    """Two classes that a plane divides with some margin: the logistic loss of SGD falls about as 1/steps there."""

    def __init__(self, samples: int) -> None:
        draw = torch.Generator().manual_seed(4)
        self._x = torch.randn(samples, 8, generator=draw)
        self._y = (self._x.sum(1) > 0).long()
        self._x += 0.3 * (2 * self._y[:, None] - 1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def margin_job(samples: int) -> Job:
    """A linear classifier of `Margin`."""
    torch.manual_seed(1)
    classifier = nn.Sequential(nn.Linear(8, 2))
    made = job(samples, MICRO_BATCH, width=2)
    graph = trace(classifier, (torch.zeros(2, 8),))
    recipe = Recipe(loss=nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=0.05))
    plan = one_stage([layer.name for layer in graph.layers], MICRO_BATCH, MICRO_BATCH)
    return replace(made, graph=graph, recipe=recipe, plan=plan, dataset=functools.partial(Margin, samples))


def losses(workers: int, pushes: int, problem: str) -> list[float]:
    """The loss of each push."""
    samples, storage = pushes * MICRO_BATCH, MemoryStorage()
    made = margin_job(samples) if problem == "margin" else job(samples, MICRO_BATCH, width=16)
    machines = [ServerWorker(name=f"w{i}", speed=1.0 + 0.01 * i) for i in range(workers)]
    history = History()
    crew = InTurnCrew(stored_job(made, storage, RUN), storage, RUN, machines)
    train_asynchronously(crew, Course(batches=made.batches, epochs=1), history)
    return [push.loss for push in history.pushes]


def fitted(found: Sequence[float], workers: int) -> InverseLoss:
    """The model of an asynchronous curve."""
    steps = tuple(float(i + 1) for i in range(len(found)))
    curve = LossCurve(steps=steps, losses=tuple(found), batch=MICRO_BATCH, workers=workers)
    return fit_inverse(curve.after(WINDOW), asynchronous=True)


def smoothed(found: Sequence[float]) -> list[float]:
    """The running mean."""
    return [sum(found[i : i + WINDOW]) / WINDOW for i in range(len(found) - WINDOW)]


def _predicted(model: InverseLoss, target: float, workers: int, seen: float) -> tuple[str, str]:
    try:
        steps = model.steps(target, workers=workers, asynchronous=True)
    except Infeasible:
        return "never", "-"
    return f"{steps:.0f}", f"{steps / seen - 1:+.1%}"


if __name__ == "__main__":
    main()
