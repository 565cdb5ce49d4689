"""The verb history, and predictions with what was observed here beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.cli.provision import plan_in
from funcpipe.core import ModelProfile, Plan, ProvisionTable, WayRun, from_text, read, write
from funcpipe.errors import InputError
from funcpipe.neighbours.history.journal import append, read_all
from funcpipe.neighbours.history.learned import fit
from tests.neighbours.history.observations import observation
from tests.neighbours.provisioning.test_compare import profile

PREDICTED_S = 11.0
"""About as long as the plan's iteration."""

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
    """With three runs like the plan's on its platform, which took twice as long as predicted; three of them here, which
    took three times as long; and a toy's, which took 19 times as long.
    """
    profiled = read(ModelProfile, here / "profile.json")
    fields = {"platform": profiled.platform, "model": profiled.model, "predicted_s": PREDICTED_S}
    entries = [
        observation(run=f"{place}{i}", ran_on=place, observed_s=times * PREDICTED_S, **fields)
        for place, times in ((profiled.platform, 2), ("local", 3))
        for i in range(3)
    ]
    toys = [
        observation(run=f"toy {place}", platform=profiled.platform, ran_on=place, predicted_s=1e-3, observed_s=0.019)
        for place in ("local", profiled.platform)
    ]
    append(here / "history.jsonl", [*entries, *toys])
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
    assert f"as observed here, on {plan.platform}: {corrected_s:.3f} s, $" in text
    assert text.count("as observed here") == 1
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
    assert "funcpipe, as observed here, on aws-lambda: " in capsys.readouterr().out
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
    assert "(x 2.72, by 3 runs" in text
    for elsewhere in (["--like", "aws-lambda"], ["--platform", "ray://auto"]):
        assert main([*words, "--dry-run", *elsewhere]) == 0
        assert "as observed" not in capsys.readouterr().out


def data() -> list[tuple[int, int]]:
    return [(0, 0)] * 128


def test_history_lists_what_is_known(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("iteration", "1024MB", "1.88", "50%", str(observed / "history.jsonl")))
    assert main(["history", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (known,) = [one for one in found["known"] if one["model"] != "small" and one["ran_on"] != "local"]
    assert (known["runs"], known["quantity"], known["error_before"]) == (3, "iteration", 0.5)
    assert known["error_after"] < 0.25
    assert found["history"] == str(observed / "history.jsonl")


PROVISION = ["provision", "profile.json", "--samples", "20000", "--global-batch", "64", "--epochs", "2"]


def test_provision_files_its_comparison_and_history_tells_how_the_choice_looks_now(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for deadline in ("3600", "86400"):
        assert main([*PROVISION, "--deadline", deadline, "--json"]) == 0
    capsys.readouterr()
    assert main(["history"]) == 0
    assert "hindsight" not in capsys.readouterr().out
    path = here / "history.jsonl"
    for comparison, slower in zip(read_all(path).comparisons, (1.0, 100.0), strict=True):
        (chosen,) = [way for way in comparison.ways if way.way == comparison.recommended]
        took = WayRun(
            comparison=comparison.key,
            way=chosen.way,
            run=f"r{slower}",
            ran_on=chosen.place,
            share=1.0,
            seconds=slower * chosen.seconds,
            usd=slower * chosen.usd,
            at_s=1.7e9,
        )
        append(path, [took, replace(took, run=f"elsewhere{slower}", ran_on="local")])
    assert main(["history"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "chosen way best in hindsight: 1 of 2 jobs" in text
    assert "are as modelled, as no run of them is known here" in text
    assert main(["history", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen_way_best_in_hindsight"] == {"jobs": 2, "best": 1}
    assert [one["best"] == one["chosen"]["way"] for one in told["hindsight"]] == [True, False]


def test_a_run_elsewhere_is_told_and_does_not_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROVISION, "--json"]) == 0
    (comparison,) = read_all(here / "history.jsonl").comparisons
    took = WayRun(
        comparison=comparison.key,
        way=comparison.ways[0].way,
        run="r",
        ran_on="local",
        share=1.0,
        seconds=1.0,
        usd=1.0,
        at_s=1.0,
    )
    append(here / "history.jsonl", [took])
    capsys.readouterr()
    assert main(["history"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "chosen way best in hindsight: 0 of 0 jobs" in text
    assert "runs that were not where the way was predicted for do not count" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "plan.way=one-machine"], "the way one-machine has no parameter server; give one that has"),
        (["--set", "plan.way=magic"], "plan.way must be one of"),
    ],
)
def test_train_takes_the_plan_of_a_way_or_says_why_not(
    more: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PROVISION, "--ways", "funcpipe,one-machine", "--json"]) == 0
    (here / "ways.json").write_text(capsys.readouterr().out)
    words = ["train", "tests.e2e.small:model", "--plan", "ways.json", "--data", "tests.cli.test_history:data"]
    assert main([*words, *more, "--dry-run"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    found = read(ProvisionTable, here / "ways.json")
    assert plan_in("ways.json", "funcpipe") == next(one.plan for one in found.provisions if one.way == "funcpipe")


def test_a_plan_has_no_ways(observed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(OPTIMIZE) == 0
    with pytest.raises(InputError, match=r"plan\.way names funcpipe, but plan\.json has no ways"):
        plan_in("plan.json", "funcpipe")
    assert plan_in("plan.json", None) == read(Plan, "plan.json")


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
