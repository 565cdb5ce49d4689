"""Steps in MLflow, in a file store of this machine."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from funcpipe.loggers import MLflowLogger
from tests.loggers import runs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


def only_run(uri: str) -> tuple[Any, Any]:
    mlflow: Any = importlib.import_module("mlflow")
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("funcpipe").experiment_id])
    return client, run


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(uri: str) -> None:
    runs.interrupted_and_resumed(MLflowLogger(uri), MLflowLogger(uri))
    client, run = only_run(uri)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == list(enumerate(runs.LOSSES, start=1))
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "val_loss")] == [2, 4, 6]
    assert (run.info.status, run.info.run_name, run.data.params["replicas"]) == ("FINISHED", runs.RUN, "2")


def test_a_run_that_fails_is_marked(uri: str) -> None:
    runs.log(MLflowLogger(uri), runs.info(), (1,), ends=False)
    assert only_run(uri)[1].info.status == "FAILED"
