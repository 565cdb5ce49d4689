"""The verb history, and predictions with what was observed here beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import ModelProfile, Plan, ProvisionTable, from_text, read, write
from funcpipe.history.correction import fit
from funcpipe.history.journal import append
from tests.history.observations import observation
from tests.provision.test_compare import profile

OPTIMIZE = ["optimize", "profile.json", "--global-batch", "64", "-o", "plan.json"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile, and an empty history."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "history.jsonl"))
    write(profile(), tmp_path / "profile.json")
    return tmp_path


@pytest.fixture
def observed(here: Path) -> Path:
    """With three runs of plans for the profile's platform, which took twice as long as predicted."""
    platform = read(ModelProfile, here / "profile.json").platform
    append(here / "history.jsonl", [observation(run=f"r{i}", platform=platform) for i in range(3)])
    return here


def test_nothing_is_added_where_nothing_was_observed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(OPTIMIZE) == 0
    assert "as observed" not in capsys.readouterr().out
    assert main([*OPTIMIZE, "--json"]) == 0
    assert "observed_here" not in json.loads(capsys.readouterr().out)
    assert main(["history"]) == 0
    assert "nothing is known yet" in capsys.readouterr().out


def test_optimize_shows_both(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(OPTIMIZE) == 0
    text, plan = capsys.readouterr().out, read(Plan, observed / "plan.json")
    assert plan.estimate is not None
    assert f"as modelled: an iteration takes {plan.estimate.iteration_s:.3f} s, " in text
    corrected_s = plan.estimate.iteration_s * fit([observation(run=f"r{i}") for i in range(3)]).factor
    assert f"as observed here, on local: {corrected_s:.3f} s, $" in text
    assert "(x 1.88, by 3 runs" in text
    assert main([*OPTIMIZE, "--json"]) == 0
    printed = capsys.readouterr().out
    (found,) = json.loads(printed)["observed_here"]
    assert found["modelled_s"] == plan.estimate.iteration_s
    assert found["observed_s"] == pytest.approx(corrected_s)
    assert found["observed_usd"] > found["modelled_usd"]
    assert replace(from_text(Plan, printed, source="printed"), solver=None) == replace(plan, solver=None)


def test_provision_shows_both_for_our_own_plans(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["provision", "profile.json", "--samples", "20000", "--global-batch", "64", "--epochs", "2"]
    words += ["--ways", "funcpipe,one-machine"]
    assert main(words) == 0
    assert "funcpipe, as observed here, on local: " in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["observed_here"]["funcpipe"][0]["factor"] == pytest.approx(1.88, abs=1e-2)
    assert {one.way for one in from_text(ProvisionTable, printed, source="printed").provisions} >= {"funcpipe"}


def test_train_shows_both_before_it_starts(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIMIZE, "--replicas", "1"]) == 0
    words = ["train", "tests.e2e.small:model", "--plan", "plan.json", "--data", "tests.cli.test_history:data"]
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "as modelled: an iteration takes " in text
    assert "as observed here, on local: " in text


def data() -> list[tuple[int, int]]:
    return [(0, 0)] * 128


def test_history_lists_what_is_known(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("iteration", "1024MB", "1.88", "50%", str(observed / "history.jsonl")))
    assert main(["history", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (known,) = found["known"]
    assert (known["runs"], known["quantity"], known["error_before"]) == (3, "iteration", 0.5)
    assert known["error_after"] < 0.25
    assert found["history"] == str(observed / "history.jsonl")


def test_a_history_that_is_turned_off_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUNCPIPE_HISTORY", "")
    assert main(["history"]) == 0
    assert "turned off" in capsys.readouterr().out


def test_errors_are_drawn(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--figure", "errors.svg"]) == 0
    drawn = (observed / "errors.svg").read_text(encoding="utf-8")
    assert "<svg" in drawn


def test_there_is_nothing_to_draw_with_fewer_than_two_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(here / "history.jsonl", [observation()])
    assert main(["history", "--figure", "errors.svg"]) == 2
    assert "no prediction has been compared with two runs" in capsys.readouterr().err
    assert not (here / "errors.svg").exists()
