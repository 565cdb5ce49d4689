"""The search over pairs of stores: the best pair, and the front of all, equal enumeration."""

from dataclasses import replace

import pytest

from funcpipe.core import Optimality, Stores
from funcpipe.errors import Infeasible
from funcpipe.partitioner.alternatives import pareto_front
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.stores import exact_over_stores, store_choices
from tests.partitioner.instances import platform, store
from tests.partitioner.oracles import AUTO, Optima, compare, front_over_pairs, optima, over_pairs
from tests.partitioner.problems import with_stores


def check_pair(problem: Problem, expected: float | None) -> None:
    choices = store_choices(problem.spec, AUTO)
    if expected is None:
        with pytest.raises(Infeasible):
            exact_over_stores(problem, choices)
        return
    found = exact_over_stores(problem, choices)
    assert found.solver
    assert found.solver.objective == pytest.approx(expected, rel=1e-8)
    assert found.solver.status is Optimality.OPTIMAL
    assert found.solver.bound is not None
    assert found.solver.bound <= found.solver.objective


@pytest.mark.parametrize("seed", range(12))
def test_the_best_pair_equals_enumeration(seed: int) -> None:
    (case,) = optima(f"pairs of stores {seed}").cases
    check_pair(with_stores(seed), case.objective)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12, 300))
def test_the_best_pair_equals_enumeration_in_more_problems(seed: int) -> None:
    (case,) = over_pairs(with_stores(seed)).cases
    check_pair(with_stores(seed), case.objective)


def check_front(problem: Problem, expected: Optima) -> None:
    problem = replace(problem, training=replace(problem.training, stores=AUTO))
    if not expected.front:
        with pytest.raises(Infeasible):
            pareto_front(problem.profile, problem.spec, problem.training)
        return
    compare(problem, expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_front_of_all_stores_equals_enumeration(seed: int) -> None:
    check_front(with_stores(seed), optima(f"front of stores {seed}"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5, 60))
def test_the_front_of_all_stores_equals_enumeration_in_more_problems(seed: int) -> None:
    check_front(with_stores(seed), front_over_pairs(with_stores(seed)))


def test_dominated_pairs_are_left_out_and_the_default_comes_first() -> None:
    worse = store("worse", latency_s=0.05, price_put_usd=1e-5, price_get_usd=1e-6)
    spec = replace(platform(1), stores=(worse, store("better")))
    assert store_choices(spec, AUTO) == (Stores(messages="better", sums="better"),)
    hourly = replace(spec, stores=(store("better", price_usd_h=1.0),))
    assert [(pair.messages, pair.sums) for pair in store_choices(hourly, AUTO)] == [
        ("default", "default"),
        ("better", "better"),
    ]
    assert store_choices(spec, Stores(messages="worse")) == (Stores(messages="worse"),)
