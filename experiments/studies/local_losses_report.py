"""Tables and figure of `experiments.studies.local_losses`, from the runs that it keeps.

    python -m experiments.studies.local_losses_report --figure docs/local_losses.png

Losses are trained; seconds and dollars are predicted, for AWS Lambda: those of the best plan of each model with these
replicas and this H, where an hour is worth $3.84. `--predict` profiles the models and plans anew. The last column of
the figure, and the last table, are what `experiments.studies.local_steps_executed` has executed.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.local_losses import (
    HEADLINE,
    IN_PARTS,
    KEPT,
    OUTER,
    PARTS,
    REPLICAS,
    SYNC_EVERY,
    THINNED,
    Result,
    Results,
    Setting,
    headline,
    in_parts,
    other_replicas,
    plain_means,
    read_results,
    tuned,
    tuning,
)
from experiments.studies.local_losses_tasks import TASKS
from experiments.studies.local_steps_executed import KEPT as EXECUTED
from experiments.studies.local_steps_executed import Learned, read_learned
from funcpipe import FuncPipe
from funcpipe.core import TrainingSpec
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec

TIME_VALUE = 3.84  # dollars an hour, as in docs/results.md
PREDICTED = KEPT.with_stem("local_losses_predicted")
KINDS: dict[str, Callable[[Result], float]] = {
    "training": lambda result: result.last,
    "unseen": lambda result: result.unseen,
    "accuracy": lambda result: 100 * result.accuracy,
}
COLOURS = dict(zip(SYNC_EVERY, ("tab:blue", "tab:cyan", "tab:green", "tab:orange", "tab:red"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A step of a task on AWS Lambda, the mean of all."""

    task: str
    replicas: int
    sync_every: int | str
    step_s: float
    step_usd: float
    functions: str


Predictions = dict[tuple[str, int, int | str], Predicted]
"""By task, number of replicas, and H."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=KEPT, help="the runs (%(default)s)")
    parser.add_argument("--predict", action="store_true", help=f"write {PREDICTED.name} anew")
    parser.add_argument("--figure", type=Path, help="draw losses over samples, seconds and dollars (needs matplotlib)")
    options = parser.parse_args()
    if options.predict:
        lines = ",\n".join(json.dumps(asdict(one)) for task in TASKS for one in predict(task))
        PREDICTED.write_text(f"[\n{lines}\n]\n")
    results = read_results(options.input)
    predicted = read_predicted(PREDICTED)
    executed = list(read_learned(EXECUTED))
    for table in (tuning_table, headline_table, replicas_table, plain_table, parts_table):
        print("\n".join(table(results)) + "\n")
    print("\n".join(equal_table(results, predicted)) + "\n")
    print("\n".join(executed_table(executed)))
    if options.figure:
        draw(results, predicted, executed, options.figure)


def predict(name: str) -> Iterator[Predicted]:
    """Profile the model of a task, and plan it with one replica, and with each number of replicas and each H."""
    task, spec = TASKS[name], load_spec("aws-lambda")
    pipe = FuncPipe(task.model(0), loss_fn=task.loss, optimizer=task.optimizer, name=name)
    micro_batch = task.global_batch // max(REPLICAS)
    inputs, targets = (tensor[:micro_batch] for tensor in task.data().tensors)
    profile = pipe.profile((inputs,), sample_target=targets, micro_batch=micro_batch)
    for replicas, every in ((1, 1), *itertools.product(REPLICAS, SYNC_EVERY)):
        steps = task.steps if isinstance(every, str) else every  # "end" is one meeting in all its steps
        wanted = TrainingSpec(
            global_batch=task.global_batch, replicas=(replicas,), sync_every=steps, time_value=TIME_VALUE
        )
        plan = optimize(profile, spec, wanted)
        estimate = plan.estimate
        assert estimate is not None
        yield Predicted(
            task=name,
            replicas=replicas,
            sync_every=every,
            step_s=estimate.iteration_s,
            step_usd=estimate.cost_usd,
            functions=", ".join(stage.size for stage in plan.stages),
        )


def read_predicted(path: Path) -> Predictions:
    found = [Predicted(**one) for one in json.loads(path.read_text())]
    return {(one.task, one.replicas, one.sync_every): one for one in found}


def tuning_table(results: Results) -> Iterator[str]:
    """Unseen losses with each outer learning rate and momentum."""
    yield "| task | " + " | ".join(f"η {lr:g}, μ {momentum:g}" for lr, momentum in OUTER) + " |"
    yield "|---|" + "--:|" * len(OUTER)
    for task in TASKS:
        best = tuned(task, results)
        values = [(results[s].unseen, (s.outer_lr, s.outer_momentum) == best) for s in tuning(task, results)]
        yield f"| {task} | " + " | ".join(f"**{v:.4f}**" if is_best else f"{v:.4f}" for v, is_best in values) + " |"


def headline_table(results: Results) -> Iterator[str]:
    """Over seeds: plain training's losses, and what each H adds to them in pairs."""
    yield "| task | loss | H = 1 | " + " | ".join(f"{name_of(every)} adds" for every in SYNC_EVERY[1:]) + " |"
    yield "|---|---|" + "--:|" * len(SYNC_EVERY)
    for task, (kind, value) in itertools.product(TASKS, KINDS.items()):
        found = {every: of_seeds(task, results, every, value) for every in SYNC_EVERY}
        digits = 1 if kind == "accuracy" else 4
        cells = [plain_and_spread(found[1], digits), *(added(found[1], found[h], digits) for h in SYNC_EVERY[1:])]
        yield f"| {task} | {kind}{', %' * (kind == 'accuracy')} | " + " | ".join(cells) + " |"


def plain_and_spread(values: Sequence[float], digits: int = 4) -> str:
    """The mean and the standard deviation."""
    return f"{statistics.fmean(values):.{digits}f} ± {spread(values):.{digits}f}"


def added(before: Sequence[float], after: Sequence[float], digits: int = 4) -> str:
    """The mean difference of pairs, with its sign, and its standard deviation."""
    pairs = [b - a for a, b in zip(before, after, strict=True)]
    return f"{statistics.fmean(pairs):+.{digits}f} ± {spread(pairs):.{digits}f}"


def of_seeds(task: str, results: Results, sync_every: int | str, value: Callable[[Result], float]) -> list[float]:
    return [value(results[s]) for s in headline(task, results) if s.sync_every == sync_every and s in results]


def spread(values: Sequence[float]) -> float:
    """The standard deviation."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def replicas_table(results: Results) -> Iterator[str]:
    """With one seed, unseen losses by the number of replicas and H."""
    yield "| task | replicas | " + " | ".join(map(name_of, SYNC_EVERY)) + " |"
    yield "|---|--:|" + "--:|" * len(SYNC_EVERY)
    for task in TASKS:
        settings = list(other_replicas(task, results))
        for replicas, row in zip(REPLICAS, batched(settings, len(SYNC_EVERY)), strict=True):
            yield f"| {task} | {replicas} | " + " | ".join(f"{results[s].unseen:.4f}" for s in row) + " |"


def plain_table(results: Results) -> Iterator[str]:
    """Unseen losses with plain means beside those as tuned, where these differ and all were run; means of seeds."""
    yield "| task | H | η = 1, μ = 0 | as tuned |"
    yield "|---|--:|--:|--:|"
    for task in TASKS:
        lr, momentum = tuned(task, results)
        if (lr, momentum) == (1.0, 0.0) or not all(s in results for s in plain_means(task, results)):
            continue
        plain = sorted(plain_means(task, results), key=lambda s: SYNC_EVERY.index(s.sync_every))
        for every, settings in itertools.groupby(plain, key=lambda s: s.sync_every):
            seeds = list(settings)
            pairs = [(results[s], results[replaced(s, lr, momentum)]) for s in seeds]
            values = (
                statistics.fmean(column) for column in zip(*((a.unseen, b.unseen) for a, b in pairs), strict=True)
            )
            yield f"| {task} | {every} | " + " | ".join(f"{value:.4f}" for value in values) + " |"


def parts_table(results: Results) -> Iterator[str]:
    """Over seeds: losses of whole meetings at once, and what each number of fragments and delay adds in pairs.

    A cell is "–" where no plan may have both, and empty where not all seeds were run.
    """
    titles = (f"F {fragments}, k {delay} adds" for fragments, delay in PARTS[1:])
    yield "| task | H | loss | F 1, k 0 | " + " | ".join(titles) + " |"
    yield "|---|--:|---|" + "--:|" * len(PARTS)
    for task, rounds in IN_PARTS.items():
        for every, kind in itertools.product(rounds, ("training", "unseen")):
            found = {part: list[float]() for part in PARTS}
            wanted = [s for s in in_parts(task, results) if s.sync_every == every]
            for setting in wanted:
                if setting in results:
                    found[setting.fragments, setting.delay].append(KINDS[kind](results[setting]))
            allowed = {(setting.fragments, setting.delay) for setting in wanted}
            whole = found[PARTS[0]]
            cells = [
                ("" if part in allowed else "–") if len(found[part]) < len(whole) else added(whole, found[part])
                for part in PARTS[1:]
            ]
            yield f"| {task} | {every} | {kind} | " + " | ".join([plain_and_spread(whole), *cells]) + " |"


def replaced(setting: Setting, lr: float, momentum: float) -> Setting:
    return Setting(**asdict(setting) | {"outer_lr": lr, "outer_momentum": momentum})


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The mean training loss over seeds, smoothed, after each of the kept groups of steps."""

    losses: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]

    def after(self, steps: float) -> float:
        """The loss after so many steps."""
        return self.losses[max(min(round(steps / THINNED), len(self.losses)) - 1, 0)]


def curve(task: str, results: Results, sync_every: int | str) -> Curve:
    found = [smooth(results[s].losses) for s in headline(task, results) if s.sync_every == sync_every]
    columns = list(zip(*found, strict=True))
    return Curve(
        losses=tuple(map(statistics.fmean, columns)), lowest=tuple(map(min, columns)), highest=tuple(map(max, columns))
    )


def smooth(losses: Sequence[float]) -> list[float]:
    """Each the mean of itself and those before it, of a tenth of all."""
    width = max(len(losses) // 10, 1)
    return [statistics.fmean(losses[max(i + 1 - width, 0) : i + 1]) for i in range(len(losses))]


Way = tuple[int, int | str]
"""A number of replicas, and H."""
WAYS: tuple[Way, ...] = ((1, 1), *((HEADLINE, every) for every in SYNC_EVERY))


def equal_table(results: Results, predicted: Predictions) -> Iterator[str]:
    """Training losses when the first of the ways has taken all its steps, and when the cheapest has been paid."""
    yield "| task | | one function | " + " | ".join(map(name_of, SYNC_EVERY)) + " |"
    yield "|---|---|" + "--:|" * len(WAYS)
    for name, task in TASKS.items():
        steps = [predicted[name, *way] for way in WAYS]
        curves = [curve(name, results, way[1]) for way in WAYS]
        least_s = task.steps * min(one.step_s for one in steps)
        least_usd = task.steps * min(one.step_usd for one in steps)
        in_time = [line.after(least_s / one.step_s) for line, one in zip(curves, steps, strict=True)]
        for_money = [line.after(least_usd / one.step_usd) for line, one in zip(curves, steps, strict=True)]
        rows = {
            "ms of a step": [f"{1000 * one.step_s:.1f}" for one in steps],
            "$ for 1,000 steps": [f"{1000 * one.step_usd:.4f}" for one in steps],
            f"loss after {least_s:.2g} s": [f"{loss:.3f}" for loss in in_time],
            f"loss after ${least_usd:.5f}": [f"{loss:.3f}" for loss in for_money],
        }
        for title, cells in rows.items():
            yield f"| {name} | {title} | " + " | ".join(cells) + " |"


def executed_table(runs: Sequence[Learned]) -> Iterator[str]:
    """What runs with H took and cost, and their unseen losses after equal steps, equal time and for equal money."""
    yield "| | " + " | ".join(name_of(run.sync_every) for run in runs) + " |"
    yield "|---|" + "--:|" * len(runs)
    steps = runs[0].points[-1].step
    least_s = min(run.points[-1].run_s for run in runs)
    least_usd = min(run.points[-1].run_usd for run in runs)
    rows = {
        f"s of the run, {steps} steps": [f"{run.points[-1].run_s:.1f}" for run in runs],
        "s predicted, of steps alone": [f"{steps * run.predicted_s:.1f}" for run in runs],
        "$ billed": [f"{run.bill_usd:.5f}" for run in runs],
        "$ predicted, of steps alone": [f"{steps * run.predicted_usd:.5f}" for run in runs],
        f"loss after {steps} steps": [f"{run.points[-1].loss:.3f}" for run in runs],
        f"loss after {least_s:.0f} s": [f"{loss_at(run, 'run_s', least_s):.3f}" for run in runs],
        f"loss after ${least_usd:.5f}": [f"{loss_at(run, 'run_usd', least_usd):.3f}" for run in runs],
    }
    for title, cells in rows.items():
        yield f"| {title} | " + " | ".join(cells) + " |"


def loss_at(run: Learned, unit: str, amount: float) -> float:
    """The loss at so many seconds or dollars, between two validations on the line through both."""
    places = [getattr(point, unit) for point in run.points]
    return float(np.interp(amount, places, [point.loss for point in run.points]))


def name_of(sync_every: int | str) -> str:
    return f"H = {sync_every}"


def batched(items: Sequence[Setting], size: int) -> Iterator[Sequence[Setting]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def draw(results: Results, predicted: Predictions, executed: Sequence[Learned], path: Path) -> None:
    """For each task the mean curve of each H between the least and the greatest seed; then what was executed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, len(TASKS) + 1, figsize=(4 * len(TASKS) + 4, 9), squeeze=False)
    for (name, task), column in zip(TASKS.items(), axes.T[:-1], strict=True):
        column[0].set_title(name)
        for way in WAYS:
            one, line = predicted[name, *way], curve(name, results, way[1])
            steps = [min(THINNED * (i + 1), task.steps) for i in range(len(line.losses))]
            units = {
                "samples": float(task.global_batch),
                "seconds, predicted": one.step_s,
                "dollars, predicted": one.step_usd,
            }
            for (unit, each), axis in zip(units.items(), column, strict=True):
                axis.set(
                    xlabel=unit, ylabel="training loss", yscale="log", xscale="linear" if unit == "samples" else "log"
                )
                if way[0] == 1:
                    if unit != "samples":
                        axis.plot([each * s for s in steps], line.losses, "k:", label="one function")
                    continue
                x = [each * s for s in steps]
                axis.plot(x, line.losses, color=COLOURS[way[1]], label=f"{HEADLINE} replicas, {name_of(way[1])}")
                axis.fill_between(x, line.lowest, line.highest, color=COLOURS[way[1]], alpha=0.15)
    axes[1][0].legend(fontsize="small")
    draw_executed(executed, list(axes.T[-1]))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def draw_executed(runs: Sequence[Learned], column: Sequence[Any]) -> None:
    """Unseen losses over samples, and over the seconds and dollars of the run; dotted as predicted for its steps."""
    column[0].set_title(f"executed, 2 stages of {HEADLINE} replicas")
    for run in runs:
        losses, steps = [point.loss for point in run.points], [point.step for point in run.points]
        units = {
            "samples": ([run.global_batch * step for step in steps], None),
            "seconds of the run": ([point.run_s for point in run.points], run.predicted_s),
            "dollars of the run": ([point.run_usd for point in run.points], run.predicted_usd),
        }
        for (unit, (x, each)), axis in zip(units.items(), column, strict=True):
            axis.set(xlabel=unit, ylabel="unseen loss")
            axis.locator_params(axis="x", nbins=4)
            axis.plot(x, losses, color=COLOURS[run.sync_every], label=name_of(run.sync_every))
            if each is not None:
                axis.plot([each * step for step in steps], losses, ":", color=COLOURS[run.sync_every])
    column[1].legend(fontsize="small", title="dotted: as predicted")


if __name__ == "__main__":
    main()
