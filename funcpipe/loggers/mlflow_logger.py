"""A logger of runs to MLflow."""

from collections.abc import Mapping
from typing import Any

from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core.distribution import needed_from
from funcpipe.loggers.values import step_values

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
