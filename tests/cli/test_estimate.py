"""What `funcpipe train` says of the cost before it starts, whom it asks, and where it logs."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funcpipe.api import FuncPipe
from funcpipe.cli import main
from funcpipe.cli.train import callbacks
from funcpipe.client.prepare.prepared_run import Confirm
from funcpipe.core import JobEstimate, JobItem, write
from funcpipe.errors import InputError
from funcpipe.loggers import CSVLogger, ProgressBar, TensorBoardLogger
from tests.client.test_job_estimate import ITERATION
from tests.e2e import small

TRAIN = ["train", "tests.e2e.small:model", "--plan", "plan.json", "--data", "tests.e2e.small:data"]
CLOUD = ["--platform", "aws-lambda://funcpipe?region=us-east-1"]
ESTIMATE = JobEstimate(
    platform="aws-lambda",
    epochs=3,
    steps=138,
    start=JobItem(),
    training=JobItem(count=138, seconds=720.0, functions_usd=0.3, requests_usd=0.11),
)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started of the runs that nobody has refused; with a plan in plan.json of the current folder."""
    monkeypatch.chdir(tmp_path)
    write(replace(small.plan(2, 1), estimate=replace(ITERATION, stages=ITERATION.stages[:2])), "plan.json")
    runs: list[str] = []

    def start(self: FuncPipe, dataset: Any, *, confirm: Confirm, **settings: Any) -> str:
        confirm(ESTIMATE)
        runs.append("left")
        return "left"

    monkeypatch.setattr(FuncPipe, "start", start)
    monkeypatch.setattr("funcpipe.cli.train.storage_url", lambda options: "s3://bucket/runs")
    return runs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "runs"), [("y\n", ["left"]), ("yes\n", ["left"]), ("n\n", []), ("\n", []), ("", [])]
)
def test_a_terminal_is_asked_whether_a_job_that_costs_is_to_start(
    started: list[str], answer: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", shown)
    assert main([*TRAIN, *CLOUD, "--detach", "--max-usd", "1"]) == (0 if runs else 2)
    assert started == runs
    line = "3 epochs, 138 steps, about 12 min, $0.41 on aws-lambda (functions 0.30, requests 0.11), cap $1"
    assert shown.getvalue().startswith(f"{line}\ngo on? [y/N] ")
    assert ("funcpipe: nothing was started" in shown.getvalue()) is not bool(runs)


@pytest.mark.parametrize("words", [["--yes"], ["--max-usd", "1"]])
def test_without_a_terminal_a_limit_or_a_yes_is_needed(
    started: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main([*TRAIN, *CLOUD, "--detach"]) == 2
    assert "$0.41 on aws-lambda" in capsys.readouterr().err
    assert started == []
    assert main([*TRAIN, *CLOUD, "--detach", *words]) == 0
    assert started == ["left"]


def test_local_functions_cost_nothing_and_nobody_is_asked(started: list[str]) -> None:
    assert main([*TRAIN, "--detach", "--storage", "file:///runs"]) == 0
    assert started == ["left"]


@pytest.mark.usefixtures("started")
def test_a_dry_run_prints_the_estimate_and_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*TRAIN, "--epochs", "2", "--dry-run", "--max-usd", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 epochs, 32 steps, about 5 min, $")
    assert ", cap $1\n" in text
    assert "checkpoints" in text
    assert main([*TRAIN, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["training"]["count"] == 16
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_logs_are_named_on_the_command_line(tmp_path: Path) -> None:
    found = callbacks([f"csv:{tmp_path / 'steps.csv'}"], quiet=False)
    assert [type(callback) for callback in found] == [ProgressBar, CSVLogger]
    assert callbacks([], quiet=True) == []
    for wrong in ("csv", "excel:steps.xls", "tensorboard:"):
        with pytest.raises(InputError, match="--log must be one of csv:…, tensorboard:…, mlflow:…, wandb:…"):
            callbacks([wrong], quiet=True)


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(InputError, match=r"tensorboard is not installed; run: pip install '.*\[tensorboard\]'"):
        TensorBoardLogger("runs")
