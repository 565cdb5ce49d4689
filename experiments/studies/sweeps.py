"""Sweeps measured: a search within a budget beside Optuna alone, many short trials, and waves on AWS Lambda, simulated.

    python -m experiments.studies.sweeps digits    60 trials of the digits network, and Optuna's own loop in one process
    python -m experiments.studies.sweeps short     200 trials of a second of processor each
    python -m experiments.studies.sweeps lambda    100 and 1,000 trials of a minute, planned and simulated

`digits` needs scikit-learn. Functions are processes of this machine, at the prices of AWS Lambda.
"""

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from funcpipe import Candidate, FuncPipe, RunLimits, Sweep, Validation
from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import JobShape
from funcpipe.core import FaultTolerance, Pins, Plan, PlatformSpec
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.process import usable_processors
from funcpipe.sweep.budget import Waves, estimate_sweep, simulate_waves
from funcpipe.sweep.sweep import SweepResult

EPOCHS, BATCH = 8, 64
MAX_USD = 0.25
CLIENT_S = 0.05
"""Processor seconds of a client that starts a trial on a cloud: 15 ms, as measured here, and some thirty requests."""


CLIENT_PUTS, CLIENT_GETS = 21, 12
"""Requests of a client for a trial, lists among the puts: counted in a sweep whose functions are threads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["digits", "short", "lambda"])
    parser.add_argument("--trials", type=int, help="trials, where not 60, or 200")
    parser.add_argument("--figure", type=Path, help="draw the simulated waves into this file")
    options = parser.parse_args()
    studies = {"digits": digits, "short": short}
    found = waves(options.figure) if options.study == "lambda" else studies[options.study](options.trials)
    print(json.dumps(found, indent=1))


class Measured:
    """The seconds that something took, and the processor seconds of this process meanwhile."""

    def __enter__(self) -> "Measured":
        self._began = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.client_s = (after - before for after, before in zip(self._now(), self._began, strict=True))

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )


def settings(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.95),
    }


def pipe_of(trial: optuna.Trial) -> FuncPipe:
    optimizer = partial(torch.optim.SGD, **settings(trial))
    return FuncPipe(network(), loss_fn=nn.functional.cross_entropy, optimizer=optimizer)


def digit_images() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    return TensorDataset(images[:1400], targets[:1400]), TensorDataset(images[1400:], targets[1400:])


def digits(trials: int | None) -> dict[str, Any]:
    """Search with functions, and with Optuna's own loop around an ordinary script."""
    count, (trained_on, held_out) = trials or 60, digit_images()
    sweep = Sweep(
        pipe_of,
        data=trained_on,
        validation=Validation(data=held_out),
        epochs=EPOCHS,
        shuffle=False,
        global_batch=BATCH,
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    with Measured() as measured:
        result = sweep.run(count, limits=RunLimits(max_usd=MAX_USD))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    alone = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    torch.set_num_threads(1)
    alone.optimize(partial(objective, trained_on=trained_on, held_out=held_out), n_trials=count)
    pairs = [
        (ours.value, theirs.value)
        for ours, theirs in zip(result.status.trials, alone.get_trials(), strict=True)
        if ours.value is not None and theirs.value is not None
    ]
    return measured_of(result, measured) | {
        "best trial": result.best.number,
        "best trial of Optuna alone": alone.best_trial.number,
        "largest difference of a value": max(abs(ours - theirs) / theirs for ours, theirs in pairs),
        "compared": len(pairs),
    }


def objective(trial: optuna.Trial, *, trained_on: TensorDataset, held_out: TensorDataset) -> float:
    """An ordinary script."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **settings(trial))
    losses = []
    for _ in range(EPOCHS):
        model.train()
        for start in range(0, len(trained_on), BATCH):
            images, labels = trained_on[start : start + BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            images, labels = held_out.tensors
            losses.append(nn.functional.cross_entropy(model(images), labels).item())
    return min(loss for loss in losses if loss == loss)


def measured_of(result: SweepResult, measured: Measured) -> dict[str, Any]:
    """What a sweep took."""
    trials = result.status.trials
    function_s = sum(trial.seconds for trial in trials)
    return {
        "trials": result.status.counts,
        "dollars": result.status.usd,
        "limit": MAX_USD,
        "seconds": measured.wall_s,
        "seconds of functions": function_s,
        "processor seconds of the client": measured.client_s,
        "client / seconds of functions": measured.client_s / function_s,
    }


class Busy(Dataset[tuple[Tensor, Tensor]]):
    """Samples of which each takes a fixed time of processor; functions note theirs, all in all, in `folder`."""

    def __init__(self, seconds: float, count: int, folder: str) -> None:
        self._seconds, self._count, self._folder = seconds, count, folder

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        until_s = time.thread_time() + self._seconds
        while time.thread_time() < until_s:
            pass
        Path(self._folder, str(os.getpid())).write_text(str(time.process_time()))
        return torch.full((4,), index / self._count), torch.tensor(index % 4)


def short(trials: int | None) -> dict[str, Any]:
    """Train trials of which each computes for a second, and validates at its end."""

    def make(trial: optuna.Trial) -> Candidate:
        optimizer = partial(torch.optim.SGD, lr=trial.suggest_float("lr", 0.01, 0.1))
        torch.manual_seed(0)
        return Candidate(pipe=FuncPipe(nn.Linear(4, 4), loss_fn=nn.functional.cross_entropy, optimizer=optimizer))

    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(
            make,
            data=Busy(0.1, 10, folder),
            validation=Validation(data=TensorDataset(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long))),
            global_batch=5,
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        with Measured() as measured:
            result = sweep.run(trials or 200)
        own = Path(folder, str(os.getpid()))  # what the trial here took is no function's
        processor_s = sum(float(note.read_text()) for note in Path(folder).iterdir() if note != own)
    return measured_of(result, measured) | {
        "processor seconds of functions": processor_s,
        "seconds x processors / processor seconds of functions": measured.wall_s * usable_processors() / processor_s,
    }


def waves(figure: Path | None) -> dict[str, Any]:
    """Plan a trial for Lambda, and simulate waves of it; `figure` shows when trials start and end."""
    spec, batch = load_spec("aws-lambda"), 256
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10)),
    )
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    pipe = FuncPipe(model, loss_fn=nn.functional.cross_entropy, optimizer=optimizer)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    pipe.profile(images, sample_target=labels, platform=spec, micro_batch=batch, repeats=2)
    large = Pins(memory_mb=2048)
    return {
        "the cheapest plan": simulated(pipe.optimize(global_batch=batch), spec, figure),
        "2,048 MB": simulated(pipe.optimize(global_batch=batch, pins=large), spec, None),
    }


def simulated(plan: Plan, spec: PlatformSpec, figure: Path | None) -> dict[str, Any]:
    """Waves of trials that train for a minute by `plan`."""
    assert plan.estimate is not None, "it was just made"
    steps = int(60.0 / plan.estimate.iteration_s)
    trial = estimate_job(
        plan, JobShape(epochs=1, steps=steps, forward_steps=2), prices=spec, faults=FaultTolerance(), functions=spec
    )
    found: dict[str, Any] = {"functions": [stage.size for stage in plan.stages], "steps": steps}
    found["seconds of a trial, with its start"] = trial.seconds
    drawn = dict[str, Waves]()
    for count in (100, 1000):
        estimate = estimate_sweep(trial, trials=count, at_once=1000, spec=spec, functions=1, first_share=None)
        made = simulate_waves([trial.seconds] * count, at_once=1000, spec=spec, client_s=CLIENT_S)
        drawn[f"{count:,} trials"] = made
        client_usd = count * spec.request_usd(puts=CLIENT_PUTS, gets=CLIENT_GETS, empty_gets=0)
        found[f"{count} trials"] = {
            "seconds": made.seconds,
            "dollars": estimate.high_usd + client_usd,
            "of which functions": count * trial.functions_usd,
            "requests of functions": estimate.high_usd - count * trial.functions_usd,
            "requests of the client": client_usd,
        }
    drawn["3,000 trials, if the client took no time"] = simulate_waves([trial.seconds] * 3000, at_once=3000, spec=spec)
    if figure is not None:
        draw(drawn, figure)
    return found


def draw(drawn: dict[str, Waves], figure: Path) -> None:
    """Draw how many trials run, over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(8, 3.2))
    for label, made in drawn.items():
        changes = sorted([(at_s, 1) for at_s in made.starts_s] + [(at_s, -1) for at_s in made.ends_s])
        running, times, counts = 0, [0.0], [0]
        for at_s, change in changes:
            running += change
            times.append(at_s)
            counts.append(running)
        axes.step(times, counts, where="post", label=label)
    axes.set(xlabel="seconds", ylabel="trials that run")
    axes.legend()
    pyplot.savefig(figure, bbox_inches="tight")


if __name__ == "__main__":
    main()
