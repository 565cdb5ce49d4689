"""The verbs provision compare and provision fit-loss."""

import json
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import read, write
from funcpipe.core.loss_model import InverseLoss, WeightedLoss
from tests.neighbours.provisioning.test_compare import profile

JOB = ["--samples", "20000", "--global-batch", "64"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile and losses of several kinds."""
    monkeypatch.chdir(tmp_path)
    write(profile(), tmp_path / "profile.json")
    losses = [30 / step + 0.5 for step in range(1, 101)]
    (tmp_path / "losses.json").write_text(json.dumps(losses))
    (tmp_path / "result.json").write_text(json.dumps({"run": "r", "losses": losses}))
    lines = [f"a,{step},{loss}" for step, loss in enumerate(losses, start=1)]
    (tmp_path / "one.csv").write_text("\n".join(["run,step,loss", *lines, ""]))
    (tmp_path / "two.csv").write_text("\n".join(["run,step,loss", *lines, "b,1,9.0", ""]))
    return tmp_path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_the_table_names_all_ways_and_the_one_to_take(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["provision", "profile.json", *JOB, "--epochs", "2", "--deadline", "3600"]) == 0
    text = capsys.readouterr().out
    for way in ("funcpipe", "lambdadnn", "cynthia-bsp", "spotdnn", "one-machine", "recommended: ", "assumed: "):
        assert way in text


def test_json_has_everything(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["provision", "profile.json", *JOB, "--epochs", "2", "--ways", "one-machine,spotdnn", "--json"]
    assert main([*words, "--set", "provision.gpu-speed=T4=1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "funcpipe.provision-table/1"
    assert {one["way"] for one in found["provisions"]} == {"one-machine", "spotdnn"}
    assert found["provisions"][0]["rented"][0]["name"] == "g4dn.xlarge"


@pytest.mark.parametrize("curve", ["losses.json", "result.json", "one.csv"])
def test_a_loss_is_fitted_and_planned_with(curve: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-loss", curve, "--batch", "64", "--target-loss", "0.6"]) == 0
    text = capsys.readouterr().out
    assert "scale 30 ±" in text
    assert "a loss of 0.6 takes 300 steps" in text
    assert read(InverseLoss, here / "loss.json").scale == pytest.approx(30)
    words = ["provision", "profile.json", *JOB, "--target-loss", "0.6", "--loss-model", "loss.json"]
    assert main([*words, "--ways", "one-machine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provisions"][0]["iterations"] == pytest.approx(300)


def test_equation_3_is_fitted_to_several_curves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = WeightedLoss(gamma1=50, gamma2=-0.01, gamma3=100, gamma5=0.5, heterogeneity=False)
    for batch, workers in ((64, 2), (256, 4)):
        told = [model.loss(step, batch=batch, workers=workers, convergence=0) for step in range(1, 101)]
        (here / f"b{batch}.json").write_text(json.dumps(told))
    words = [
        "fit-loss",
        "b64.json",
        "b256.json",
        "--batch",
        "64,256",
        "--set",
        "provision.workers=2,4",
        "--form",
        "weighted",
    ]
    assert main([*words, "-o", "weighted.json", "--target-loss", "0.8"]) == 0
    assert "γ3 100" in capsys.readouterr().out
    job = ["provision", "profile.json", *JOB, "--target-loss", "0.8", "--loss-model", "weighted.json"]
    assert main([*job, "--ways", "spotdnn"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("provision profile.json --epochs 1 --market gcp", "market must be one of aliyun, aws"),
        ("provision profile.json --target-loss 1", "--target-loss needs --loss-model"),
        ("provision profile.json --epochs 1 --loss-model losses.json", "--loss-model is for --target-loss"),
        (
            "provision profile.json --target-loss 1 --loss-model none.json",
            "a loss model is written by `funcpipe provision fit-loss`",
        ),
        ("provision profile.json --target-loss 1 --loss-model profile.json", "expected 'funcpipe.loss-inverse/1'"),
        ("provision none.json --epochs 1", "none.json: cannot be read"),
        ("provision profile.json --epochs 1 --ways magic", "ways must be some of"),
        ("provision profile.json --epochs 1 --set provision.gpu-speed=X=3", "names 'X'; the market aws has T4"),
        (
            "provision profile.json --epochs 1 --set provision.gpu-speed=T4=fast",
            "provision.gpu-speed must read GPU=VCPUS, such as T4=40",
        ),
        ("provision profile.json --epochs 1 --set provision.miss-chance=1", "miss_chance must be below 1"),
        ("provision profile.json --epochs 1 --figure x.txt", "its name must end with"),
        ("fit-loss losses.json", "--batch must say how many samples"),
        ("fit-loss none.json --batch 8", "none.json: cannot be read"),
        ("fit-loss profile.json --batch 8", "an object with the field 'losses'"),
        ("fit-loss two.csv --batch 8", "holds the runs a, b: say which with --run"),
        ("fit-loss two.csv --batch 8 --run c", "holds no run 'c', only a, b"),
        ("fit-loss one.csv one.csv --batch 8", "--form inverse fits one curve, got 2"),
        ("fit-loss one.csv one.csv --batch 8 --form weighted", "at least two different batches"),
        ("fit-loss one.csv --batch 8,9", "--batch takes one number or 1"),
        ("fit-loss one.csv --batch few", "--batch takes numbers"),
        ("fit-loss r --batch 8 --storage file:///tmp", "--batch is known from the runs"),
        ("fit-loss one.csv --batch 8 --set provision.skip=99", "of 1 points cannot be fitted"),
        ("fit-loss one.csv --batch 8 -o profile.json", "is there already, and is a profile of funcpipe"),
    ],
)
def test_mistakes_are_told_with_the_way_out(
    words: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *rest = words.split()
    assert told in refused([verb, *rest, *(JOB if verb == "provision" else [])], capsys)


def test_a_figure_is_drawn(here: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["provision", "profile.json", *JOB, "--epochs", "2", "--ways", "one-machine,lambdadnn", "-q"]
    assert main([*words, "--figure", "ways.svg"]) == 0
    assert "<svg" in (here / "ways.svg").read_text()
