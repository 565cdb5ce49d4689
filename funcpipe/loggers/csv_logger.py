"""A logger of runs into a CSV file: a line for each step of a run, in the order of steps."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.loggers.values import step_values

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
