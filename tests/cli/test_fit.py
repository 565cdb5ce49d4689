"""The verb fit: what it says, and the plan that it writes or finds."""

from pathlib import Path
from unittest import mock

import pytest

from funcpipe import FuncPipe
from funcpipe.cli import main
from funcpipe.core import Plan, read

FIT = ["fit", "funcpipe.examples.spirals:model", "--data", "funcpipe.examples.spirals:train_data", "--dry-run"]
FIT += ["--epochs", "2", "--global-batch", "64", "--micro-batch", "16"]


def test_a_plan_is_written_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, "--plan", "plan.json"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("64 samples a step, as asked; 16 at a time, measured here\n1 function of ")
    assert said.out.startswith("2 epochs, 32 steps, about ")
    plan = read(Plan, "plan.json")
    assert (plan.global_batch, plan.micro_batch, plan.platform) == (64, 16, "local")
    with mock.patch.object(FuncPipe, "profile", side_effect=AssertionError):
        assert main([*FIT, "--plan", "plan.json", "--quiet"]) == 0
    assert capsys.readouterr() == (said.out, "")
    assert read(Plan, "plan.json") == plan


def test_of_several_platforms_it_takes_the_best_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "history.jsonl"))
    assert main([*FIT, "--platform", "local,aws-lambda"]) == 0
    here, there, takes, *chosen = capsys.readouterr().err.splitlines()
    assert (here.partition(":")[0], there.partition(":")[0]) == ("local", "aws-lambda")
    assert takes == "takes local: the cheapest; there is no deadline"
    assert any("on local" in line for line in chosen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batch", "7"], "funcpipe: micro_batch must divide the global batch of 64 samples, got 7"),
        (["--take-over"], "funcpipe: --take-over says what to do with a run that another command trains"),
        (
            ["--precision", "bf16-true"],
            "argument --precision: must be one of fp32, bf16, fp16, in which parameters stay",
        ),
        (["--data", "nowhere:data"], "nowhere:data: there is no module 'nowhere'"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(FuncPipe, "profile", side_effect=AssertionError):
        assert main([*FIT, *words]) == 2
    assert message in capsys.readouterr().err
