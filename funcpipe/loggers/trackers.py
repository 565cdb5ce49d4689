"""Loggers of runs to trackers of experiments: TensorBoard, MLflow, Weights & Biases."""

import importlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core.distribution import needed_from
from funcpipe.loggers.local import step_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Callback):
    """A logger into the folder DIRECTORY/RUN, so that TensorBoard on `directory` shows all runs that are logged there.

    When a run is resumed, its curves go on: steps that are trained again replace what was logged of them
    (`purge_step`), and steps that were done without a logger are added with their loss. Raises InputError if
    TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        with needed_from("tensorboard"):
            importlib.import_module("tensorboard")
            from torch.utils import tensorboard
        self._tensorboard = tensorboard
        self._directory = os.fspath(directory)
        self._writer: SummaryWriter | None = None

    def on_start(self, run: RunInfo) -> None:
        """Open the folder; what was logged of steps that are to come is hidden."""
        folder = os.path.join(self._directory, run.run)
        known = _logged_steps(folder) if run.resumed else set[int]()
        self._writer = self._tensorboard.SummaryWriter(folder, purge_step=run.done + 1)
        for step, loss in run.known_losses.items():
            if step not in known:
                self._writer.add_scalar("loss", loss, step)

    def on_step(self, progress: Progress) -> None:
        """Add the numbers of a step."""
        self._add(progress.step, step_values(progress))

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Add what was validated."""
        self._add(step, values)

    def on_end(self, result: RunResult) -> None:
        """Write what is left."""
        self._close()

    def on_error(self, error: BaseException) -> None:
        """Write what is left."""
        self._close()

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _logged_steps(folder: str) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not os.path.isdir(folder):
        return set()
    log = logging.getLogger("tensorboard")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of steps that were hidden on purpose
    try:
        events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    finally:
        log.setLevel(level)
    return {event.step for event in events.Scalars("loss")} if "loss" in events.Tags()["scalars"] else set()


_TAG = "funcpipe.run"


class MLflowLogger(Callback):
    """A logger to the tracking server or store at `uri` (a folder's `file:` URL will do), in `experiment`.

    The MLflow run has a tag with the run's name, by which it is found when the run is resumed or watched again. MLflow
    cannot take values back: steps that are trained again, with the same result, are logged once, as they were at first.
    Raises InputError if MLflow is not installed.
    """

    def __init__(self, uri: str, *, experiment: str = "funcpipe") -> None:
        with needed_from("mlflow"):
            import mlflow
        self._mlflow: Any = mlflow
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._experiment = experiment
        self._id = ""
        self._steps: set[int] = set()
        self._validations: set[tuple[str, int]] = set()

    def on_start(self, run: RunInfo) -> None:
        """Find the run in MLflow, or make it."""
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        self._id = (self._find(number, run.run) if run.resumed else None) or self._begin(number, run)
        self._client.update_run(self._id, status="RUNNING")
        self._steps = {metric.step for metric in self._client.get_metric_history(self._id, "loss")}
        for step, loss in run.known_losses.items():
            if step not in self._steps:
                self._client.log_metric(self._id, "loss", loss, step=step)

    def on_step(self, progress: Progress) -> None:
        """Log the numbers of a step that is not known yet, with one request."""
        if progress.step in self._steps:
            return
        self._steps.add(progress.step)
        self._log(progress.step, step_values(progress))

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log what was validated, unless that is known."""
        known = {name: {metric.step for metric in self._client.get_metric_history(self._id, name)} for name in values}
        self._log(step, {name: value for name, value in values.items() if step not in known[name]})

    def on_end(self, result: RunResult) -> None:
        """Mark the run as finished, with its bill."""
        self._client.log_metric(self._id, "bill_usd", result.bill.cost_usd)
        self._client.set_terminated(self._id, status="FINISHED")

    def on_error(self, error: BaseException) -> None:
        """Mark the run as failed; it goes on when it is resumed."""
        if self._id:
            self._client.set_tag(self._id, "funcpipe.error", str(error)[:500])
            self._client.set_terminated(self._id, status="FAILED")

    def _find(self, experiment: str, run: str) -> str | None:
        name = run.replace("'", "")
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{name}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _begin(self, experiment: str, run: RunInfo) -> str:
        made = self._client.create_run(experiment, run_name=run.run, tags={_TAG: run.run.replace("'", "")})
        for name, value in run.settings.items():
            self._client.log_param(made.info.run_id, name, value)
        return str(made.info.run_id)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        at_ms = self._mlflow.utils.time.get_current_time_millis()
        metrics = [self._mlflow.entities.Metric(name, value, at_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)


class WandbLogger(Callback):
    """A logger to `project`, with the files of W&B in `directory`; `mode="offline"` keeps them there for `wandb sync`.

    `DIRECTORY/funcpipe-RUN.json` says which run of W&B is the run's, and which steps it has: one that is resumed or
    watched again from this folder goes on there (`resume="allow"`); elsewhere give its `id`. W&B cannot take values
    back: steps that are trained again, with the same result, are logged once. Raises InputError if W&B is missing.
    """

    def __init__(
        self, project: str, *, directory: str | os.PathLike[str] = ".", mode: str | None = None, id: str | None = None
    ) -> None:
        with needed_from("wandb"):
            import wandb
        self._wandb: Any = wandb
        self._project = project
        self._directory = Path(directory)
        self._mode = mode
        self._id = id
        self._run: Any = None
        self._note = Path()
        self._step = self._known = 0

    def on_start(self, run: RunInfo) -> None:
        """Go on with the run in W&B, or make it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._note = self._directory / f"funcpipe-{re.sub(r'[^A-Za-z0-9_.-]', '-', run.run)}.json"
        known = json.loads(self._note.read_text()) if run.resumed and self._note.exists() else {}
        name = re.sub(r"[^A-Za-z0-9_-]", "-", run.run)[:80]
        self._id = self._id or known.get("id") or f"{name}-{secrets.token_hex(3)}"
        self._step = known.get("step", 0)
        self._run = self._wandb.init(
            project=self._project,
            id=self._id,
            name=run.run,
            resume="allow",
            dir=str(self._directory),
            mode=self._mode,
            config=run.settings,
        )
        self._step = max(self._step, (self._run.step or 1) - 1)  # W&B says which step comes next
        self._known = self._step
        for step, loss in run.known_losses.items():
            self._log(step, {"loss": loss})

    def on_step(self, progress: Progress) -> None:
        """Log the numbers of a step that is not known yet."""
        self._log(progress.step, step_values(progress))

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log what was validated, with the step that it was validated after."""
        if step > self._known:
            self._run.log(dict(values), step=step)

    def on_end(self, result: RunResult) -> None:
        """Send what is left, with the bill."""
        self._run.summary["bill_usd"] = result.bill.cost_usd
        self._finish(0)

    def on_error(self, error: BaseException) -> None:
        """Send what is left."""
        self._finish(1)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._step:
            self._step = step
            self._run.log(dict(values), step=step)

    def _finish(self, code: int) -> None:
        if self._run is not None:
            self._note.write_text(json.dumps({"id": self._id, "step": self._step}))
            self._run.finish(exit_code=code)
