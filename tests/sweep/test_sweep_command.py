"""`funcpipe sweep`: what it prints, asks and writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from funcpipe.cli import main
from funcpipe.core import write
from funcpipe.show.describe import describe
from tests.sweep import small_sweeps
from tests.sweep.small_sweeps import Threads, network, plan, threads, validated

__all__ = ["threads"]

MODULE = "tests.sweep.small_sweeps"
WORDS = ["--data", f"{MODULE}:training_data", "--validation-data", f"{MODULE}:validation_data", "--epochs", "2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    write(plan(), "plan.json")
    return tmp_path


def swept(*words: str) -> int:
    given = ["sweep", f"{MODULE}:make", *WORDS, "--plan", "plan.json", "--sampler", "random", "--max-functions", "2"]
    return main([*given, *words])


def test_it_writes_the_best_model_a_page_and_json(
    threads: Threads, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept("--trials", "3", "--json", "-o", "best.safetensors", "--page", "sweep.html") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "funcpipe.sweep/1"
    assert [trial["state"] for trial in found["trials"]] == ["finished"] * 3
    best = found["trials"][found["best"]]
    assert best["value"] == min(trial["value"] for trial in found["trials"])
    model = network()
    model.load_state_dict(load_file("best.safetensors"))
    assert validated(model) == pytest.approx(best["value"], rel=1e-5)
    page = Path("sweep.html").read_text()
    assert page.count("<svg") >= 3
    assert f"{best['settings']['lr']:.5g}" in page


def test_it_prints_lines_and_a_table(threads: Threads, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert swept("--trials", "2", "--set", "training.monitor-mode=max", "--pruner", "median") == 0
    out = capsys.readouterr().out
    assert "best val_loss" in out
    assert "pruning saved" not in out
    assert "trials: 2 finished, of 2" in out
    assert "best so far: trial" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --trials N, or --items"),
        (("--trials", "2", "--sampler", "best"), "--sampler must be one of tpe, random"),
        (("--trials", "2", "--pruner", "all"), "--pruner must be one of none, median"),
        (("--trials", "2", "--monitor", "accuracy"), "monitor must be one of val_loss"),
        (("--trials", "2", "--metric", "accuracy"), "must read NAME=MODULE:FACTORY"),
    ],
)
def test_mistakes_are_named(
    threads: Threads, here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert swept(*words) == 2
    assert message in capsys.readouterr().err
    assert not threads.started


def test_a_status_is_described_in_a_notebook_too(threads: Threads) -> None:
    result = small_sweeps.sweep().run(2, max_functions=2, faults=small_sweeps.STEADY, storage="memory://")
    assert describe(result).facts == describe(result.status).facts
    assert "trials" in repr(result)
    assert "<table" in result._repr_html_()
    assert isinstance(result.model, torch.nn.Module)
