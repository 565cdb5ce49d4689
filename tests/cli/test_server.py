"""The verb provision train."""

import json
import sys
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import write
from tests.neighbours.provisioning.test_compare import profile

MODEL = "funcpipe.examples.spirals:model"
TRAIN = ["train-server", MODEL, "--data", "funcpipe.examples.spirals:train_data", "--provision", "provision.json"]
BATCH = ["--global-batch", "64", "--micro-batch", "16"]


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
        ("--way siren", "--way must be one of"),
        ("--way one-machine", "has no parameter server"),
        ("--way lambdadnn --platform nowhere --yes", "platform must be local, ray://…, or a deployment"),
        ("--way lambdadnn --platform aws-lambda", "training on aws-lambda costs money: lambdadnn is predicted to take"),
        ("--way lambdadnn --max-usd 1e-7", "the job is expected to cost more than the limit of $1e-07"),
        ("--way spotdnn --like aws-lambda", "like is for functions"),
        ("--way spotdnn --max-usd 3", "limits hold for functions alone"),
        ("--way spotdnn --checkpoint 5", "give --storage URL too"),
        ("--way spotdnn --market nowhere", "market must be one of"),
        ("--way spotdnn --platform ray://host:1", "must be given with a Ray cluster"),
        ("--way spotdnn --platform aws-lambda", "platform must be ray://local, ray://auto"),
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
    assert main([*TRAIN, *BATCH, "--way", "spotdnn"]) == 2
    said = capsys.readouterr().err
    assert "spotdnn trains on machines: its server and its workers are actors of Ray, on this machine too" in said
    assert "run: pip install 'funcpipe-torch[ray]', or take a way on functions, such as lambdadnn" in said
    with pytest.raises(SystemExit):
        main(["train-server", "--help"])
    assert "those of a way on machines need Ray" in " ".join(capsys.readouterr().out.split())


def test_lambdadnn_s_way_trains_a_model_on_functions(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    way = ["--way", "lambdadnn", "--epochs", "2", "--like", "aws-lambda", "-o", "trained.safetensors"]
    assert main([*TRAIN, *BATCH, *way, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["step_s"]) == len(found["losses"])
    assert found["lost"] == []
    assert found["cost_usd"] > 0
    assert (here / "trained.safetensors").exists()
