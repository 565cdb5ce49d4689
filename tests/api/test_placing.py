"""`fit` over several platforms: the best by predictions that runs have corrected, and what the history knows of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from funcpipe import RunLimits, RunSettings
from funcpipe.api import fitting, placing
from funcpipe.api.fitting import Chosen, Wanted
from funcpipe.api.placing import choose_among_places
from funcpipe.core import Observation, Quantity
from funcpipe.core.estimate import JobEstimate, JobItem
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.neighbours.history.hindsight import hindsights
from funcpipe.neighbours.history.journal import append, read_all
from funcpipe.platforms.catalog import places_of
from tests.api.test_fit import pipe_of, plan_of
from tests.api.threads import SAMPLES, data, functions_in_threads

STEPS = 100
JOB_S, USD = {"here": 3600.0, "there": 360.0}, {"here": 0.1, "there": 1.0}
"""What a job takes at two places: there it is ten times as fast, and costs ten times as much."""


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "history.jsonl"))
    with mock.patch.object(placing, "choose_for_run", _planned):
        yield


def _planned(pipe: Any, dataset: Any, wanted: Wanted, **_: Any) -> Chosen:
    place = wanted.platform
    if place not in JOB_S:
        raise Infeasible("no function is large enough")
    plan = replace(plan_of(4, 8), platform=place, estimate=None)
    pipe._plan = plan
    training = JobItem(count=STEPS, seconds=JOB_S[place], functions_usd=USD[place])
    job = JobEstimate(platform=place, epochs=1, steps=STEPS, start=JobItem(), training=training)
    return Chosen(plan=plan, lines=(f"planned for {place}",), job=job)


def chosen(platform: str = "here,there", limits: RunLimits | None = None, **terms: Any) -> tuple[str, Chosen, Any]:
    pipe = pipe_of()
    settings = terms.pop("settings", RunSettings())
    platform, found = choose_among_places(
        pipe,
        data(),
        Wanted(platform=platform, **terms),
        epochs=1,
        validation=None,
        limits=limits or RunLimits(),
        settings=settings,
    )
    return platform, found, pipe


@pytest.mark.parametrize(
    ("limits", "time_value", "best"),
    [
        (RunLimits(), 0.0, "here"),
        (RunLimits(), 0.99, "here"),  # 0.9 hours are saved for 0.9 dollars
        (RunLimits(), 1.01, "there"),
        (RunLimits(deadline_s=1800), 0.0, "there"),
        (RunLimits(deadline_s=7200), 0.0, "here"),
        (RunLimits(max_usd=0.5), 1.01, "here"),
        (RunLimits(max_usd=0.01, allow_partial=True), 0.0, "here"),
    ],
)
def test_the_cheapest_place_that_keeps_the_limits_is_taken(limits: RunLimits, time_value: float, best: str) -> None:
    platform, found, pipe = chosen(limits=limits, time_value=time_value)
    assert platform == found.plan.platform == pipe._plan.platform == best
    assert found.lines[-2].startswith(f"takes {best}: the cheapest")
    assert found.lines[-1] == f"planned for {best}"
    assert found.lines[:2] == ("here: 60 min, $0.10, modelled", "there: 6 min, $1.00, modelled")


def test_predictions_are_those_that_runs_have_corrected(tmp_path: Path) -> None:
    """Many runs here took 20 times as long as was predicted: it is dearer than there."""
    seen = [
        Observation(
            run=f"run-{i}",
            platform="here",
            ran_on="here",
            size=plan_of(4, 8).stages[0].size,
            model=plan_of(4, 8).model,
            quantity=Quantity.ITERATION,
            predicted_s=JOB_S["here"] / STEPS,
            observed_s=20 * JOB_S["here"] / STEPS,
            at_s=float(i),
        )
        for i in range(20)
    ]
    append(tmp_path / "history.jsonl", seen)
    platform, found, _ = chosen()
    assert platform == "there"
    assert found.lines[0].endswith(", corrected")


def test_a_place_that_cannot_do_the_job_is_left_out_with_the_reason() -> None:
    platform, found, _ = chosen("nowhere,there")
    assert platform == "there"
    assert "nowhere: no function is large enough" in found.lines


def test_where_no_place_does_the_job_all_are_told() -> None:
    with pytest.raises(Infeasible, match=r"for \$0.05:\nhere: 60 min, \$0.10.*\nthere: .*\nnowhere: no function"):
        chosen("here,there,nowhere", RunLimits(max_usd=0.05))


@pytest.mark.parametrize("terms", [{"settings": RunSettings(resume="last")}, {"like": "aws-lambda"}])
def test_what_goes_with_one_platform_is_refused_with_several(terms: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="goes with one platform"):
        chosen(**terms)


def test_one_platform_is_not_compared() -> None:
    platform, found, _ = chosen("there")
    assert (platform, found.lines) == ("there", ("planned for there",))
    assert not read_all().comparisons


def test_a_text_names_each_place_once() -> None:
    assert places_of("local, aws-lambda,,local") == ("local", "aws-lambda")


def test_the_run_that_follows_is_judged_in_hindsight() -> None:
    with functions_in_threads(), mock.patch.object(placing, "choose_for_run", fitting.choose_for_run):
        pipe_of().fit(data(), platform="local,aws-lambda", micro_batch=4, global_batch=8, progress=False)
    (found,) = hindsights(read_all())
    assert found.comparison.job.samples == SAMPLES
    assert {way.way for way in found.comparison.ways} == {"local", "aws-lambda"}
    assert found.chosen.way == found.comparison.recommended == "local"
    assert found.counts
