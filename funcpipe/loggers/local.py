"""A run's progress on this machine: a bar in a terminal or a notebook, log lines elsewhere; files."""

import csv
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich import progress as bars
from rich.console import Console
from torch import Tensor

from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.export import SavedModel
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core import checks
from funcpipe.core.texts import number_text


def step_values(progress: Progress) -> dict[str, float]:
    """The loss of a step, and the run's progress and cost so far; unknown values are left out."""
    values = {"loss": progress.loss, "cost_usd": progress.cost_usd, "elapsed_s": progress.elapsed_s}
    if progress.samples_per_s:
        values["samples_per_s"] = progress.samples_per_s
    if progress.learning_rate is not None:
        values["learning_rate"] = progress.learning_rate
    return values


_log = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between log lines where no bar can be drawn."""


class ProgressBar(Callback):
    """A line with the job's estimate, then a bar with step, loss, samples a second, dollars and the time that is left.

    Where there is neither a terminal nor a notebook, a line is logged every EVERY_S instead (level info, which needs
    logging to be set up).
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A `console` of its own writes to stderr; in a notebook rich draws the bar below the cell."""
        self._console = console or _console()
        self._draws = self._console.is_terminal or self._console.is_jupyter
        self._clock = clock
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)
        self._values = ""
        self._logged_s = clock()

    def on_start(self, run: RunInfo) -> None:
        """Show what is expected."""
        line = f"{run.run}: {_expected(run)}"
        if not self._draws:
            _log.info("%s", line)
            return
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        columns = (
            bars.TextColumn("step"),
            bars.MofNCompleteColumn(),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[status]}", markup=False),
            bars.TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._bar = bars.Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=run.steps, completed=run.done, status="starting")
        self._bar.start()

    def on_step(self, progress: Progress) -> None:
        """Draw a step, or log a line if it is time."""
        rate = f"  {progress.samples_per_s:.0f} samples/s" if progress.samples_per_s else ""
        status = f"loss {progress.loss:.4f}{rate}  ${number_text(progress.cost_usd, 6)}{self._values}"
        if self._bar is not None:
            self._bar.update(self._task, total=progress.steps, completed=progress.step, status=status)
        elif self._clock() - self._logged_s >= EVERY_S or progress.step == progress.steps:
            self._logged_s = self._clock()
            _log.info("step %d of %d: %s", progress.step, progress.steps, status)

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Show the newest values beside the loss."""
        self._values = "".join(f"  {name} {value:.4f}" for name, value in values.items())

    def on_end(self, result: RunResult) -> None:
        """End the bar."""
        self._stop()

    def on_error(self, error: BaseException) -> None:
        """End the bar."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _console() -> Console:
    console = Console()
    return console if console.is_jupyter else Console(stderr=True)


def _expected(run: RunInfo) -> str:
    if run.estimate is None:
        return f"{run.steps - run.done} of {run.steps} steps, with no estimate in the plan"
    return run.estimate.line(run.max_usd)


_COLUMNS = ("run", "step", "loss", "samples_per_s", "cost_usd", "elapsed_s", "learning_rate")


class CSVLogger(Callback):
    """A logger that appends each step to the file at `path`, which is made if need be.

    It may hold several runs: of each run and step there is one line, the one that was trained last. Columns that
    validation adds come last. When a run is resumed, or watched again, its lines go on; steps that were done
    without a logger have only a loss.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._run = ""
        self._columns = list(_COLUMNS)
        self._known: dict[int, dict[str, str]] = {}
        self._last: dict[str, str] | None = None

    def on_start(self, run: RunInfo) -> None:
        """Read the lines of the run, and keep those that are not trained again."""
        self._run = run.run
        rows = self._read()
        own = {int(row["step"]): row for row in rows if row["run"] == run.run} if run.resumed else {}
        before = [self._row(step, {"loss": loss}, own) for step, loss in run.known_losses.items()]
        self._known = {step: row for step, row in own.items() if step > run.done}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write([*(row for row in rows if row["run"] != run.run), *before])

    def on_step(self, progress: Progress) -> None:
        """Append the line of a step; one that was logged before, with the same loss, as it was."""
        values = step_values(progress)
        old = self._known.pop(progress.step, None)
        if old is not None and old["loss"] == _text(progress.loss) and "samples_per_s" not in values:
            self._last = old
        else:
            self._last = self._row(progress.step, values, {})
        self._append(self._last)

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values to the line of `step`; the file is written anew."""
        rows = self._read()
        new = [name for name in values if name not in self._columns]
        self._columns += new
        for row in rows:
            if row["run"] == self._run and int(row["step"]) == step:
                row.update({name: _text(value) for name, value in values.items()})
        self._write(rows)

    def on_end(self, result: RunResult) -> None:
        """Do nothing: every line is written."""

    def _row(self, step: int, values: Mapping[str, float], own: Mapping[int, dict[str, str]]) -> dict[str, str]:
        logged = own.get(step)
        if logged is not None and logged["loss"] == _text(values["loss"]):
            return logged
        return {"run": self._run, "step": str(step)} | {name: _text(value) for name, value in values.items()}

    def _read(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if row.get("run") and (row.get("step") or "").isdigit()]
            self._columns += [name for name in reader.fieldnames or () if name not in self._columns]
        return rows

    def _write(self, rows: list[dict[str, str]]) -> None:
        part = self._path.with_name(self._path.name + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self._path)

    def _append(self, row: dict[str, str]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)


def _text(value: float) -> str:
    return repr(float(value))


class CheckpointFiles(Callback):
    """A callback that writes the model into `folder` as the run goes on: RUN-STEP.pt, for `load_state_dict`.

    A file is written of a checkpoint that is at least `every_steps` steps newer than the last file, and of the result.
    With `keep`, only so many of these stay, the newest ones. The models of the best validations are written at the
    end: RUN-best.pt, and with `Validation(keep_best=3)` RUN-best-2.pt and RUN-best-3.pt. How often a run saves is
    `FaultTolerance.checkpoint_steps`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_steps: int = 1, keep: int | None = None) -> None:
        checks.whole("every_steps", every_steps, 1)
        if keep is not None:
            checks.whole("keep", keep, 1)
        self._folder, self._every_steps, self._keep = Path(folder), every_steps, keep
        self._run, self._last, self._steps = "", 0, 0

    def on_start(self, run: RunInfo) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run, self._last, self._steps = run.run, run.done, run.done

    def on_checkpoint(self, step: int, load: Callable[[], SavedModel]) -> None:
        """Write a file, if it is time."""
        if step - self._last >= self._every_steps:
            saved = load()
            self._write(saved.step, saved.state_dict())

    def on_end(self, result: RunResult) -> None:
        """Write the result, under the number of its last step, and the best model."""
        self._write(self._steps, result.state_dict())
        for place, step in enumerate(result.best_models, 1):
            self._save(result.best_state_dict(step), "best" if place == 1 else f"best-{place}")

    def on_step(self, progress: Progress) -> None:
        """Count."""
        self._steps = progress.step

    def _write(self, step: int, state: Mapping[str, Tensor]) -> None:
        self._save(state, f"{step:08d}")
        self._last = step
        files = sorted(self._folder.glob(f"{self._run}-????????.pt"))
        for old in files[: -self._keep] if self._keep is not None else ():
            old.unlink()

    def _save(self, state: Mapping[str, Tensor], name: str) -> None:
        path = self._folder / f"{self._run}-{name}.pt"
        part = path.with_suffix(".part")
        torch.save(dict(state), part)
        part.replace(path)
