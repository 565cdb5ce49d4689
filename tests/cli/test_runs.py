"""The verbs that start runs and look at them, on runs of which only the storage is real."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.api import FuncPipe
from funcpipe.cli import main
from funcpipe.cli.commands import parse
from funcpipe.cli.train import checked_plan, model_with
from funcpipe.cli.verbs import Options
from funcpipe.core import Busy, Interval, OptimizerKind, write
from funcpipe.core.logs import prefix
from funcpipe.core.run_key import RunKey
from funcpipe.errors import RunInterrupted
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.output import FOLDER, log_file
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import list_generations, reserve_generation, write_record
from funcpipe.runstate.signing import signed
from funcpipe.training.averaging import EMA
from funcpipe.training.verify import TensorDifference, Verification
from tests.e2e import small
from tests.run_documents import BEAT, RECORD

TRAIN = ["train", "tests.e2e.small:model", "--plan", "plan.json", "--data", "tests.e2e.small:data"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of two stages in the file plan.json of the current folder."""
    monkeypatch.chdir(tmp_path)
    write(small.plan(2, 1), "plan.json")


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    """A storage with the run `left`, whose two workers were heard of once."""
    url = (tmp_path / "objects").as_uri()
    storage = signed(open_storage(url))
    keys = reserve_generation(storage, "left")
    record = replace(
        RECORD,
        run="left",
        generation=keys.generation,
        nonce=keys.nonce,
        platform="local:///nowhere",
        storage=url,
    )
    write_record(storage, keys, record)
    for worker in ("s0.r0", "s1.r0"):
        beat = replace(
            BEAT,
            worker=worker,
            attempt=1,
            beat=7,
            step=5,
            alive_s=12.0,
            step_s=1.5,
            memory_bytes=300 << 20,
            spent_usd=0.0012,
            run_usd=0.0024,
            run_s=20.0,
            saved_step=4,
            busy=(Busy(lane="download", task="get.s1.m0", since_s=0.5, awaits="put.s0.m0"),),
        )
        put_document(storage, keys.heartbeat(worker, beat.attempt), beat)
    return url


def test_a_run_is_shown_stopped_and_deleted(
    storage_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda s: None)
    assert main(["status", "left", "--storage", storage_url]) == 3
    shown = capsys.readouterr().out
    assert "dead: no function sends heartbeats any more, last heartbeat 1970-01-01 " in " ".join(shown.split())
    assert f"funcpipe train ... --resume left --storage {storage_url}\n" in shown
    assert f"funcpipe run logs left --storage {storage_url}\n" in shown
    assert "between two steps" not in shown
    assert "left: step 5 of 16, 20 s, $0.002400" in shown
    assert "300 of 1024" in shown
    assert "silent" in shown
    assert main(["stop", "left", "--storage", storage_url, "--wait", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["halt"] == "it was stopped"
    assert main(["status", "left", "--storage", storage_url, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "dead"
    assert main(["status", "left", "--storage", storage_url]) == 3
    assert "ends early: it was stopped" in capsys.readouterr().out
    assert main(["clean", "left", "--storage", storage_url]) == 0
    assert "run left: 7 objects deleted" in capsys.readouterr().out
    assert main(["status", "left", "--storage", storage_url]) == 2
    assert "left" in capsys.readouterr().err


def test_a_run_s_key_is_printed_and_lets_another_machine_look_after_the_run(
    storage_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda s: None)
    about = ["left", "--storage", storage_url]
    assert main(["status", *about, "--key"]) == 0
    key = capsys.readouterr().out.strip()
    (keys,) = list_generations(open_storage(storage_url), "left")
    assert RunKey(key).fingerprint == keys.nonce
    assert main(["status", *about, "--key", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"run": "left", "key": key}
    monkeypatch.setenv("FUNCPIPE_KEY_DIR", str(tmp_path / "another machine"))
    for words in (["status", *about], ["stop", *about, "--wait", "0"], ["status", *about, "--key"]):
        assert main(words) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "the key of run left is not on this machine" in said
        assert "`funcpipe run status left --key` prints it: set FUNCPIPE_RUN_KEY to that here" in said
    monkeypatch.setenv("FUNCPIPE_RUN_KEY", key)
    assert main(["status", *about]) == 3
    assert main(["clean", *about]) == 0
    assert open_storage(storage_url).list("") == ()
    assert main(["status", *about, "--key"]) == 2


@pytest.mark.usefixtures("plan")
def test_a_run_that_is_left_says_how_to_find_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}

    def start(self: FuncPipe, dataset: Any, **settings: Any) -> str:
        given.update(settings)
        return "left"

    monkeypatch.setattr(FuncPipe, "start", start)
    monkeypatch.setattr("funcpipe.client.prepare.precheck.precheck", lambda *_: None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    words = ["--detach", "--storage", "s3://bucket/runs?region=x", "--run", "left", "--epochs", "7"]
    assert main([*TRAIN, *words, "--set", "platform.spec=aws-lambda"]) == 0
    shown = capsys.readouterr().out
    assert "funcpipe run status left --storage 's3://bucket/runs?region=x'\n" in shown
    assert "watch it:   funcpipe run watch left --storage 's3://bucket/runs?region=x'\n" in shown
    assert "collect it: funcpipe train ... --resume left --storage 's3://bucket/runs?region=x'\n" in shown
    assert (given["settings"].name, given["epochs"], given["settings"].prices.name) == ("left", 7, "aws-lambda")


@pytest.mark.usefixtures("plan")
def test_a_run_that_is_left_on_a_deployment_lies_in_its_bucket(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FuncPipe, "start", lambda self, dataset, **settings: "left")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setattr("funcpipe.platforms.aws.account.Account.number", "123456789012", raising=False)
    assert main([*TRAIN, "--detach", "--yes", "--platform", "aws-lambda://funcpipe?region=us-east-1"]) == 0
    assert "s3://funcpipe-123456789012-us-east-1/runs?region=us-east-1" in capsys.readouterr().out


RESUME = """\
  resume it:  funcpipe train ... --resume run-1 --storage file:///runs
  in Python:  pipe.train(dataset, ..., resume='run-1', storage='file:///runs')
  delete it:  funcpipe run clean run-1 --storage file:///runs"""


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize(
    ("interrupt", "told"),
    [
        (
            RunInterrupted("run-1", running=True, kept=True, storage="file:///runs"),
            "interrupted; run run-1: it goes on\n"
            "  watch it:   funcpipe run watch run-1 --storage file:///runs\n"
            "  collect it: funcpipe train ... --resume run-1 --storage file:///runs\n"
            "  in Python:  pipe.train(dataset, ..., resume='run-1', storage='file:///runs')\n"
            "  status:     funcpipe run status run-1 --storage file:///runs\n"
            "  stop it:    funcpipe run stop run-1 --storage file:///runs\n"
            "  delete it:  funcpipe run clean run-1 --storage file:///runs",
        ),
        (
            RunInterrupted("run-1", running=False, kept=True, storage="file:///runs", saved_step=5, steps=9),
            f"interrupted; run run-1: it was stopped, and step 5 of 9 is saved\n{RESUME}",
        ),
        (
            RunInterrupted("run-1", running=False, kept=False, storage="file:///runs"),
            "interrupted; run run-1: it was stopped and its objects were deleted",
        ),
        (
            RunInterrupted("run-1", running=False, kept=True, storage="file:///runs", saved_step=0),
            f"interrupted; run run-1: it was stopped before a step was saved\n{RESUME}",
        ),
        (
            RunInterrupted("run-1", running=False, kept=True, storage="file:///runs"),
            f"interrupted; run run-1: it was stopped, and what it saved is kept\n{RESUME}",
        ),
        (KeyboardInterrupt(), "interrupted"),
    ],
    ids=["watching", "kept", "deleted", "before a step", "no step known", "no run"],
)
def test_ctrl_c_says_what_became_of_the_run(
    interrupt: KeyboardInterrupt, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(self: FuncPipe, dataset: Any, **settings: Any) -> None:
        raise interrupt

    monkeypatch.setattr(FuncPipe, "train", train)
    assert main([*TRAIN, "--storage", "file:///runs", "--quiet"]) == 1
    assert capsys.readouterr().err == f"funcpipe: {told}\n"


@pytest.mark.usefixtures("plan")
def test_a_second_ctrl_c_while_the_first_is_dealt_with_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(self: FuncPipe, dataset: Any, **settings: Any) -> None:
        try:
            raise RunInterrupted("run-1", running=False, kept=True, storage="file:///runs")
        finally:
            raise KeyboardInterrupt

    monkeypatch.setattr(FuncPipe, "train", train)
    assert main([*TRAIN, "--storage", "file:///runs", "--quiet"]) == 1
    assert "funcpipe run clean run-1" in capsys.readouterr().err


@pytest.mark.usefixtures("plan")
def test_a_plan_that_trains_something_else_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = (
        TensorDifference(name="0.weight", layer="0", difference=0.5),
        TensorDifference(name="0.bias", layer="0", difference=0),
    )
    found = Verification(steps=3, tolerance=1e-4, tensors=tensors)
    monkeypatch.setattr(FuncPipe, "verify", lambda self, dataset, **settings: found)
    assert main(["verify", *TRAIN[1:], "--loss", "own"]) == 1
    shown = capsys.readouterr()
    assert "DIFFERS" in shown.out
    assert "the first layer that differs is 0: 0.weight is off by 5.00e-01, more than 1.00e-04 of what" in shown.err


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def model_of(options: Options) -> FuncPipe:
    return model_with(options, checked_plan(options))


@pytest.mark.usefixtures("plan")
def test_schedule_and_average_are_the_ones_that_were_named() -> None:
    words = [
        "--set",
        "training.scheduler=tests.cli.test_runs:schedule",
        "--set",
        "training.scheduler-interval=step",
        "--set",
        "training.ema=0.9",
    ]
    pipe = model_of(parse([*TRAIN, *words]))
    recipe = pipe._recipe
    assert recipe.scheduler is not None
    assert recipe.scheduler.__name__ == "schedule"
    assert (recipe.scheduler_interval, recipe.average) == (Interval.STEP, EMA(decay=0.9))
    pipe = model_of(parse(TRAIN))
    assert (pipe._recipe.scheduler, pipe._recipe.average) == (None, None)


@pytest.mark.usefixtures("plan")
@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        (OptimizerKind.SGD, ["--lr", "0.5"], {"lr": 0.5, "momentum": 0}),
        (OptimizerKind.MOMENTUM, ["--lr", "0.5"], {"lr": 0.5, "momentum": 0.9}),
        (OptimizerKind.ADAM, [], {"lr": 0.01, "betas": (0.9, 0.999)}),
        (OptimizerKind.ADAM, ["--optimizer", "tests.e2e.small:optimizer"], {"lr": 0.1}),
    ],
)
def test_the_optimiser_is_the_one_that_was_named_or_else_the_plan_s(
    kind: OptimizerKind, words: list[str], expected: dict[str, float]
) -> None:
    write(replace(small.plan(2, 1), optimizer=kind), "plan.json")
    pipe = model_of(parse([*TRAIN, *words]))
    optimizer = pipe._recipe.optimizer([nn.Parameter(torch.zeros(1))])
    assert {name: optimizer.defaults[name] for name in expected} == expected


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "logs"))
    for name, time_s, level in (("s0.r0", 2, "INFO"), ("s0.r1", 1, "WARNING"), ("s0.r1", 3, "PRINT")):
        begin = prefix(time_s, level, run="run-1", worker=name, attempt=0)
        with log_file("run-1", f"{name}.a0").open("a") as file:
            file.write(f"{begin} line {time_s}\n")


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["line 1", "line 2", "line 3"]),
        (["--worker", "s0.r1"], ["line 1", "line 3"]),
        (["--level", "warning"], ["line 1"]),
        (["--platform", "local"], ["line 1", "line 2", "line 3"]),
    ],
)
def test_lines_are_merged_and_chosen(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "run-1", *words]) == 0
    assert [line[-6:] for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("words", [[], ["--platform", "local"], ["--storage", "{}"]])
def test_a_run_that_nobody_knows_is_told(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = (tmp_path / "objects").as_uri()
    assert main(["logs", "run-2", *(word.format(storage) for word in words)]) == 2
    assert "run-2" in capsys.readouterr().err
