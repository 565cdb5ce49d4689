"""The optima that other tests compare with are what the oracles say."""

from collections.abc import Iterable
from dataclasses import astuple

import pytest

from tests.partitioner.instances import draw_problem
from tests.partitioner.oracles import Optima, asked_of, enumerated, kept_names, optima, oracles

QUICK = (1, 2, 3, 5, 10, 11, 13)
"""Seeds of which all plans are priced in a moment."""


def numbers(values: object) -> Iterable[object]:
    """All numbers and names within tuples and dictionaries, in order."""
    if isinstance(values, dict):
        values = tuple(values.items())
    if isinstance(values, tuple):
        for value in values:
            yield from numbers(value)
    else:
        yield values


def check(name: str) -> None:
    found, kept = list(numbers(astuple(oracles()[name]()))), list(numbers(astuple(optima(name))))
    assert len(found) == len(kept), name
    for one, other in zip(found, kept, strict=True):
        assert one == (pytest.approx(other, rel=1e-11) if isinstance(other, float) else other), name


def test_those_of_small_problems_are_what_the_oracles_say() -> None:
    for seed in QUICK:
        check(f"all modes {seed}")
    for name in ("divided 1", "larger 0", "loading 1", "pairs of stores 1"):
        check(name)


def test_the_policy_that_prices_all_plans_one_after_the_other_finds_them() -> None:
    for seed in QUICK:
        for case in optima(f"all modes {seed}").cases:
            (found,) = enumerated(asked_of(draw_problem(seed), case.asked)).cases
            assert (found.objective is None) == (case.objective is None)
            if case.objective is not None:
                assert found.objective == pytest.approx(case.objective, rel=1e-11)


def test_each_oracle_has_been_asked() -> None:
    assert kept_names() == list(oracles())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", oracles())
def test_what_is_kept_is_what_the_oracle_says(name: str) -> None:
    check(name)


def test_optima_without_a_plan_or_a_front_are_kept_too() -> None:
    assert any(case.objective is None for name in kept_names() for case in optima(name).cases)
    assert isinstance(optima("all modes 1"), Optima)
