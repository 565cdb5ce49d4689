"""The verb train, by a way around a parameter server."""

import json
import sys
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import write
from tests.neighbours.provisioning.test_compare import profile

MODEL = "funcpipe.examples.spirals:model"
TRAIN = ["train", MODEL, "--data", "funcpipe.examples.spirals:train_data", "--plan", "provision.json"]
BATCH = ["--set", "model.micro-batch=16"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with what `funcpipe provision compare --json` has printed."""
    monkeypatch.chdir(tmp_path)
    write(profile(), tmp_path / "profile.json")
    words = ["provision", "profile.json", "--samples", "20000", "--global-batch", "64", "--epochs", "2"]
    assert main([*words, "--ways", "one-machine,spotdnn,lambdadnn", "--json"]) == 0
    (tmp_path / "provision.json").write_text(capsys.readouterr().out)
    return tmp_path


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--set plan.way=siren", "plan.way must be one of"),
        ("--set plan.way=one-machine", "has no parameter server"),
        ("--set plan.way=lambdadnn --platform nowhere --yes", "platform must be local, ray://…, or a deployment"),
        (
            "--set plan.way=lambdadnn --platform aws-lambda",
            "training on aws-lambda costs money: lambdadnn is predicted to take",
        ),
        ("--set plan.way=lambdadnn --max-usd 1e-7", "the job is expected to cost more than the limit of $1e-07"),
        ("--set plan.way=spotdnn --like aws-lambda", "like is for functions"),
        ("--set plan.way=spotdnn --max-usd 3", "limits hold for functions alone"),
        ("--set plan.way=spotdnn --set training.checkpoint=5", "give --storage URL too"),
        ("--set plan.way=spotdnn --set platform.market=nowhere", "market must be one of"),
        ("--set plan.way=spotdnn --platform ray://host:1", "must be given with a Ray cluster"),
        ("--set plan.way=spotdnn --platform aws-lambda", "platform must be ray://local, ray://auto"),
        ("--set plan.way=spotdnn --detach --storage file:///tmp/x", "--detach is for training by a plan"),
        ("--set plan.way=spotdnn --set training.ema=0.9", "--set training.ema is for training by a plan"),
    ],
)
def test_mistakes_are_told(more: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, *BATCH, *more.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_way_on_machines_says_that_it_needs_ray_here_too(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything else is done: the default is processes of this machine, and it is Ray that starts them."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "funcpipe.examples.spirals", None)
    assert main([*TRAIN, *BATCH, "--set", "plan.way=spotdnn"]) == 2
    said = capsys.readouterr().err
    assert "spotdnn trains on machines: its server and its workers are actors of Ray, on this machine too" in said
    assert "run: pip install 'funcpipe-torch[ray]', or take a way on functions, such as lambdadnn" in said


def test_a_way_says_what_it_takes_and_what_it_does_not_know(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--set", "plan.way=lambdadnn"]) == 2
    assert "does not say how large a batch is: give --set model.micro-batch=N" in capsys.readouterr().err
    assert main([*TRAIN, *BATCH, "--set", "plan.way=lambdadnn", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("lambdadnn is predicted to take ")


def test_lambdadnn_s_way_trains_a_model_on_functions(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    way = ["--set", "plan.way=lambdadnn", "--epochs", "2", "--like", "aws-lambda", "-o", "trained.safetensors"]
    assert main([*TRAIN, *BATCH, *way, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["step_s"]) == len(found["losses"])
    assert found["lost"] == []
    assert found["cost_usd"] > 0
    assert (here / "trained.safetensors").exists()
