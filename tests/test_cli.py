"""The verbs in a shell, one after the other, each reading what the one before wrote."""

import json
from pathlib import Path

import pytest
import torch

from funcpipe.cli import main
from funcpipe.core import ModelProfile, Plan, read, read_trace

MODEL, SAMPLE, DATA = "tests.e2e.small:model", "tests.e2e.small:sample", "tests.e2e.small:data"


@pytest.mark.slow
def test_from_a_profile_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", MODEL, "--sample", SAMPLE, "--micro-batch", "2", "--platform", "local"]) == 0
    assert read(ModelProfile, "profile.json").micro_batch == 2
    assert main(["optimize", "profile.json", "--global-batch", "8", "--replicas", "2"]) == 0
    assert read(Plan, "plan.json").replicas == 2
    assert main(["simulate", "plan.json", "--profile", "profile.json", "--trace", "predicted.json", "--gantt"]) == 0
    assert "s0.r1 compute" in capsys.readouterr().out
    words = ["--plan", "plan.json", "--data", DATA, "--epochs", "2", "--trace", "observed.json", "-o", "model.pt"]
    assert main(["train", MODEL, *words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 16
    assert torch.load("model.pt")["0.weight"].shape == (8, 4)
    assert len(read_trace("observed.json").steps()) == 16
    assert main(["report", "observed.json", "--predicted", "predicted.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "funcpipe.comparison/1"
    assert main(["report", "observed.json", "--predicted", "predicted.json"]) == 0
    assert "ratio" in capsys.readouterr().out


def test_platforms_are_listed_and_shown_in_the_form_that_spec_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["platforms"]) == 0
    assert "aws-lambda" in capsys.readouterr().out
    assert main(["platforms", "show", "aws-lambda", "--json"]) == 0
    path = tmp_path / "spec.json"
    path.write_text(capsys.readouterr().out)
    assert main(["platforms", "show", str(path)]) == 0
    assert "10240MB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["platforms", "show"], "say which platform to show"),
        (["platforms", "show", "mars"], "platform must be one of"),
        (["optimize", "nowhere.json", "--global-batch", "8"], "nowhere.json: cannot be read"),
        (["optimize", "nowhere.json", "--global-batch", "8", "-o", "no/plan.json"], "there is no folder no"),
        (["profile", "nothing", "--sample", SAMPLE], "'nothing' must read MODULE:FACTORY"),
        (
            ["profile", "tests.e2e.small:SAMPLES", "--sample", SAMPLE],
            "is a int; it must be something that can be called",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_every_verb_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("profile", "optimize", "simulate", "train", "report", "platforms"):
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
        assert f"example:\n  funcpipe {verb}" in capsys.readouterr().out
