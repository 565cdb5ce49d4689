"""Try eight learning rates side by side, over local functions, and take the best.

    python learning_rates.py

One thread for each: jobs are tried one after the other, and run at the same time. Each leaves the bits that it would
leave alone.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from funcpipe import FuncPipe, Plan

RATES = [0.001 * 3**number for number in range(8)]
EPOCHS, GLOBAL_BATCH, MICRO_BATCH = 3, 64, 32


def points(seed: int) -> TensorDataset:
    """Points of the plane; the class of each says whether it lies in the unit circle."""
    x = 3 * torch.rand(256, 2, generator=torch.Generator().manual_seed(seed)) - 1.5
    return TensorDataset(x, (x.norm(dim=1) < 1).long())


def pipe_of(model: nn.Module, rate: float) -> FuncPipe:
    """The model with one learning rate."""
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9)
    return FuncPipe(model, loss_fn=nn.functional.cross_entropy, optimizer=optimizer)


def score(model: nn.Module, rate: float, plan: Plan) -> float:
    """Train, and say how many of other points are right."""
    pipe_of(model, rate).train(points(0), epochs=EPOCHS, plan=plan, progress=False)
    x, inside = points(1).tensors
    with torch.no_grad():
        return (model.eval()(x).argmax(1) == inside).float().mean().item()


def main() -> None:
    """Make the models first: torch's random numbers belong to the whole program."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    pipe = pipe_of(model, RATES[0])
    pipe.profile(points(0)[:MICRO_BATCH][0], micro_batch=MICRO_BATCH, platform="local", repeats=2)
    plan = pipe.optimize(global_batch=GLOBAL_BATCH)
    models = [copy.deepcopy(model) for _ in RATES]
    with ThreadPoolExecutor(len(RATES)) as threads:
        scores = list(threads.map(partial(score, plan=plan), models, RATES))
    for rate, found in zip(RATES, scores, strict=True):
        print(f"learning rate {rate:5.3f}: {found:4.0%} right")
    print(f"the best of {len(scores)} is {RATES[scores.index(max(scores))]:.3f}")


if __name__ == "__main__":
    main()
