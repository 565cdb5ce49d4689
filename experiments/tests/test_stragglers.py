"""The study of stragglers: its rows, from a few steps of few functions."""

from pathlib import Path

import pytest

from experiments.paper.planning import profile_of
from experiments.studies.stragglers import deaths, draw, measured, noise, plan_of
from funcpipe.platforms.catalog import load_spec

SPEC = load_spec("aws-lambda")


def test_a_row_has_the_mean_of_steps_with_and_without_deaths(tmp_path: Path) -> None:
    row = measured(16, 2)
    seconds, none = row["seconds"], row["without a death"]
    assert none == pytest.approx(0.999**16)
    assert seconds["mean"] == pytest.approx(none * seconds["noisy"] + (1 - none) * seconds["with a death"])
    assert all(
        died["seconds"] >= noisy["seconds"]
        for noisy, died in zip(row["played"]["noisy"], row["played"]["with a death"], strict=True)
    )
    assert row["dollars"]["mean"] > 0
    draw([row], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_functions_differ_by_five_per_cent_and_one_in_a_thousand_dies() -> None:
    plan = plan_of(4096, profile_of("resnet101", SPEC.name), SPEC)
    factors = list(noise(plan, 0).stragglers.values())
    assert len(factors) == plan.workers == 4096
    mean = sum(factors) / len(factors)
    assert mean == pytest.approx(1, abs=0.005)
    assert (sum((factor - mean) ** 2 for factor in factors) / len(factors)) ** 0.5 == pytest.approx(0.05, rel=0.05)
    counts = [len(deaths(plan, SPEC, 5.0, seed)) for seed in range(200)]
    assert sum(counts) / len(counts) == pytest.approx(4.1 / (1 - 0.999**4096), rel=0.1)
    assert {failure.worker for failure in deaths(plan, SPEC, 5.0, 0)} <= noise(plan, 0).stragglers.keys()
