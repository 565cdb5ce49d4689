"""The optima that other tests compare with are what the oracles say."""

from collections.abc import Iterable
from dataclasses import astuple

import pytest

from tests.partitioner.instances import draw_problem
from tests.partitioner.oracles import asked_of, enumerated, kept_names, optima, oracles

QUICK = {
    "all modes": (1, 2, 3, 10, 11, 13, 20, 22, 23, 24, 28, 29),
    "divided": (1, 2, 3),
    "larger": (1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 15, 18, 19, 20, 22, 23, 24),
    "loading": (2, 3),
    "pairs of stores": (1, 2, 3, 10),
    "front of stores": (1, 2, 3),
    "pinned": (0, 1, 4, 5, 7, 9, 13, 14, 17),
}
"""Seeds of which the oracles are asked in a moment."""

TELLING = (6, 8, 15, 18, 19, 25, 27)
"""Seeds of problems whose best plans have several stages: a mistake in pricing a stage behind another shows in them."""


def numbers(values: object) -> Iterable[object]:
    """All numbers and names within tuples and dictionaries, in order."""
    if isinstance(values, dict):
        values = tuple(values.items())
    if isinstance(values, tuple):
        for value in values:
            yield from numbers(value)
    else:
        yield values


ORACLES = oracles()


def check(name: str) -> None:
    found, kept = list(numbers(astuple(ORACLES[name]()))), list(numbers(astuple(optima(name))))
    assert len(found) == len(kept), name
    for one, other in zip(found, kept, strict=True):
        assert one == (pytest.approx(other, rel=1e-11) if isinstance(other, float) else other), name


def test_those_of_small_problems_are_what_the_oracles_say() -> None:
    for kind, seeds in QUICK.items():
        for seed in seeds:
            check(f"{kind} {seed}")


def test_those_of_problems_with_several_stages_are_too() -> None:
    for seed in TELLING:
        check(f"all modes {seed}")
    check("divided 0")
    check("tied, divided True")


def test_the_policy_that_prices_all_plans_one_after_the_other_finds_them() -> None:
    for seed in QUICK["all modes"]:
        for case in optima(f"all modes {seed}").cases:
            (found,) = enumerated(asked_of(draw_problem(seed), case.asked)).cases
            assert (found.objective is None) == (case.objective is None)
            if case.objective is not None:
                assert found.objective == pytest.approx(case.objective, rel=1e-11)


def test_what_is_kept_is_of_many_kinds() -> None:
    """Else a search that never finds anything, or an empty file, might agree with it."""
    cases = [case for name in kept_names() for case in optima(name).cases]
    assert sum(case.objective is None for case in cases) > 30
    assert sum(case.objective is not None for case in cases) > 200
    fronts = [optima(name).front for name in kept_names()]
    assert sum(len(front) > 5 for front in fronts if front) > 25


def test_each_oracle_has_been_asked() -> None:
    assert kept_names() == list(ORACLES)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ORACLES)
def test_what_is_kept_is_what_the_oracle_says(name: str) -> None:
    check(name)
