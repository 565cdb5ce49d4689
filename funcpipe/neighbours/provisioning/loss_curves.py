"""The losses that a run has left in its storage, or a file, to fit a loss model to."""

import csv
import json
import os
from pathlib import Path
from typing import Any

from funcpipe.core import worker_name
from funcpipe.errors import DataError, FormatError, RunUnknown
from funcpipe.neighbours.provisioning.fit_loss import LossCurve
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.runstate.finished import find_finished
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keyring import signed
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.step_reports import load_reported


def run_curve(run: str, *, storage: str | Storage) -> LossCurve:
    """The mean loss of each step of a run that has finished and was kept, or of one that still trains, so far.

    Raises RunUnknown, or RunKeyMissing for a run of another machine.
    """
    own = signed(open_storage(storage) if isinstance(storage, str) else storage)
    record = newest_record(own, run)
    keys, finished = Keys.of(record), find_finished(own, Keys.of(record))
    losses = list(record.losses)
    if finished is not None:
        losses = list(finished.losses)
    else:
        last = len(record.plan.stages) - 1
        reported = [
            load_reported(own, keys, worker_name(last, replica)).reports for replica in range(record.plan.replicas)
        ]
        step = record.first_step
        while all(step in reports for reports in reported):
            own_reports = [reports[step] for reports in reported]
            losses.append(sum(one.loss_sum for one in own_reports) / sum(one.samples for one in own_reports))
            step += 1
    if not losses:
        raise RunUnknown(f"run {run} has reported no loss yet; try again later")
    steps = tuple(float(step) for step in range(record.began_step + 1, record.began_step + len(losses) + 1))
    return LossCurve(steps=steps, losses=tuple(losses), batch=record.plan.global_batch)


def file_curve(path: str | os.PathLike[str], *, batch: float, run: str | None = None) -> LossCurve:
    """The losses in a file: JSON (`[…]`, or an object with `losses` and perhaps `steps`), or CSV with a column `loss`.

    The column `step` counts lines from 1 if it is missing. A CSV of several runs, as `CSVLogger` writes, needs `run`.
    """
    text = Path(path)
    try:
        steps, losses = _from_csv(text, run) if text.suffix.lower() == ".csv" else _from_json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    return LossCurve(steps=tuple(steps), losses=tuple(losses), batch=batch)


def _from_json(path: Path) -> tuple[list[float], list[float]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    found: Any = data.get("losses") if isinstance(data, dict) else data
    if not isinstance(found, list):
        raise FormatError(f"{path}: expected an array of losses, or an object with the field 'losses'")
    steps = data.get("steps") if isinstance(data, dict) else None
    if not isinstance(steps, list):  # what `train --json` prints counts its steps in another way
        steps = range(1, len(found) + 1)
    try:
        return [float(step) for step in steps], [float(loss) for loss in found]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: field 'losses' must be an array of numbers: {error}") from error


def _from_csv(path: Path, run: str | None) -> tuple[list[float], list[float]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "loss" not in rows[0]:
        raise FormatError(f"{path}: expected a line of names with 'loss' among them, and lines of values below it")
    runs = sorted({row["run"] for row in rows if row.get("run")})
    if run is None and len(runs) > 1:
        raise DataError(f"{path} holds the runs {', '.join(runs)}: say which with --run")
    if run is not None and run not in runs:
        raise DataError(f"{path} holds no run {run!r}, only {', '.join(runs) or 'lines without a run'}")
    own = [row for row in rows if row["loss"] and (run is None or row["run"] == run)]
    try:
        return [float(row.get("step") or i) for i, row in enumerate(own, start=1)], [float(row["loss"]) for row in own]
    except ValueError as error:
        raise FormatError(f"{path}: steps and losses must be numbers: {error}") from error
