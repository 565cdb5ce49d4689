"""Losses of replicas that train alone and meet every H steps, after equal samples.

Four small tasks are trained by the reference of local steps in one process (`funcpipe.training.plain_rounds`, the bits
of which a run over functions has). With one seed, training begins with the same weights and sees the same batches, of
which each replica takes its share. H = 1 is plain training, whatever the number of replicas.

    python -m experiments.studies.local_losses --output out/local_losses.json

The runs kept in `local_losses.json` took 23 processor minutes, those in fragments or with a delay 14 on a slower
machine. Those that an output holds already are not run again, so that a call can be interrupted. First, the outer
learning rate and momentum of each task are chosen by runs with a seed of their own; where replicas meet only once, in
the end, they take the mean. Tables and figure: `experiments.studies.local_losses_report`.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from experiments.studies.local_losses_tasks import TASKS, train, unseen_loss
from funcpipe.core import END
from funcpipe.core.rounds import fragment_numbers
from funcpipe.training.plain_rounds import LocalSteps

KEPT = Path(__file__).with_suffix(".json")
SEEDS = range(5)
REPLICAS = (2, 4, 8)
HEADLINE = 4
"""The number of replicas that all seeds have."""
SYNC_EVERY: tuple[int | str, ...] = (1, 2, 8, 32, END)
TUNING_SEED = 100
TUNED_AT = 8
OUTER = tuple(itertools.product((1.0, 0.7), (0.0, 0.5, 0.9)))
"""The outer learning rates and momenta that are tried."""
PARTS = ((1, 0), (1, 1), (1, 3), (4, 0), (4, 1), (4, 3))
"""The fragments and delays that are compared; the first is the headline's."""
IN_PARTS = {"transformer": (8, 32), "characters": (8,)}
"""The H with which they are, by task."""
THINNED = 4
"""The number of steps whose mean loss is kept."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training."""

    task: str
    seed: int
    replicas: int
    sync_every: int | str
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0

    def local(self, model: nn.Module) -> LocalSteps:
        return LocalSteps(
            sync_every=None if isinstance(self.sync_every, str) else self.sync_every,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            fragments=self.fragments,
            fragment_of=fragment_of(model, self.fragments),
            delay=self.delay,
        )


def fragment_of(model: nn.Module, fragments: int) -> dict[str, int]:
    """The fragment of each parameter, where one stage has all of the model."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    numbers = fragment_numbers([parameter.numel() for parameter in parameters], fragments)
    return dict(zip(names, numbers, strict=True))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The mean training losses of every few steps, and loss and accuracy on unseen data in the end."""

    losses: tuple[float, ...]
    unseen: float
    accuracy: float
    cpu_s: float

    @property
    def last(self) -> float:
        """The mean training loss of the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(len(self.losses) // 10, 1) :])


Results = dict[Setting, Result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=list(TASKS))
    parser.add_argument("--output", type=Path, default=KEPT, help="where results are kept, and added to (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = read_results(options.output) if options.output.exists() else {}
    for setting in wanted(options.tasks, results):
        result = results[setting] = run(setting)
        write_results(results, options.output)
        print(f"{setting}: {result.last:.4f}, unseen {result.unseen:.4f}, {result.cpu_s:.1f} s", flush=True)


def wanted(tasks: Sequence[str], results: Mapping[Setting, Result]) -> Iterator[Setting]:
    """Yield the settings that have no result yet, in order; those after tuning depend on its results."""
    for phase in (tuning, headline, other_replicas, plain_means, in_parts):
        for task in tasks:
            yield from (setting for setting in phase(task, results) if setting not in results)


def tuning(task: str, results: Mapping[Setting, Result]) -> Iterator[Setting]:
    """One seed, and each of the outer learning rates and momenta."""
    for lr, momentum in OUTER:
        yield Setting(
            task=task,
            seed=TUNING_SEED,
            replicas=HEADLINE,
            sync_every=TUNED_AT,
            outer_lr=lr,
            outer_momentum=momentum,
        )


def tuned(task: str, results: Mapping[Setting, Result]) -> tuple[float, float]:
    """The outer learning rate and momentum with the least unseen loss."""
    best = min(tuning(task, results), key=lambda setting: results[setting].unseen)
    return best.outer_lr, best.outer_momentum


def of_task(
    task: str, results: Mapping[Setting, Result], seeds: Iterable[int], replicas: Iterable[int]
) -> Iterator[Setting]:
    """All H, as tuned; with H = 1, the number of replicas changes nothing, and is 1."""
    lr, momentum = tuned(task, results)
    for seed, count, every in itertools.product(seeds, replicas, SYNC_EVERY):
        if every == 1:
            yield Setting(task=task, seed=seed, replicas=1, sync_every=1)
        elif every == END:
            yield Setting(task=task, seed=seed, replicas=count, sync_every=END)
        else:
            yield Setting(task=task, seed=seed, replicas=count, sync_every=every, outer_lr=lr, outer_momentum=momentum)


def headline(task: str, results: Mapping[Setting, Result]) -> Iterator[Setting]:
    return of_task(task, results, SEEDS, (HEADLINE,))


def other_replicas(task: str, results: Mapping[Setting, Result]) -> Iterator[Setting]:
    return of_task(task, results, SEEDS[:1], REPLICAS)


def plain_means(task: str, results: Mapping[Setting, Result]) -> Iterator[Setting]:
    """Three of the headline's seeds with plain means, the default."""
    for seed, every in itertools.product(SEEDS[:3], (TUNED_AT, 32)):
        yield Setting(task=task, seed=seed, replicas=HEADLINE, sync_every=every)


def in_parts(task: str, results: Mapping[Setting, Result]) -> Iterator[Setting]:
    """Three of the headline's seeds, as tuned, with each number of fragments and each delay that a plan may have."""
    lr, momentum = tuned(task, results)
    for every, (fragments, delay), seed in itertools.product(IN_PARTS.get(task, ()), PARTS, SEEDS[:3]):
        if delay * fragments < every:
            yield Setting(
                task=task,
                seed=seed,
                replicas=HEADLINE,
                sync_every=every,
                outer_lr=lr,
                outer_momentum=momentum,
                fragments=fragments,
                delay=delay,
            )


def run(setting: Setting) -> Result:
    """Train, then look at unseen data."""
    task = TASKS[setting.task]
    local = setting.local(task.model(setting.seed))
    began_s = time.process_time()
    model, losses = train(task, setting.seed, setting.replicas, local)
    cpu_s = time.process_time() - began_s
    unseen, accuracy = unseen_loss(task, model)
    parts = (losses[first : first + THINNED] for first in range(0, len(losses), THINNED))
    return Result(
        losses=tuple(round(statistics.fmean(part), 5) for part in parts),
        unseen=round(unseen, 5),
        accuracy=round(accuracy, 4),
        cpu_s=round(cpu_s, 1),
    )


def read_results(path: Path) -> Results:
    rows = json.loads(path.read_text())["runs"]
    return {
        Setting(**row["setting"]): Result(**row["result"] | {"losses": tuple(row["result"]["losses"])}) for row in rows
    }


def write_results(results: Results, path: Path) -> None:
    """One line for each run."""
    rows = [json.dumps({"setting": asdict(s), "result": asdict(r)}) for s, r in results.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"runs": [\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    main()
