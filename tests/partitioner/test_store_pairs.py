"""The search over pairs of stores: the best pair, and the front of all, equal enumeration."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from funcpipe.core import MB, Optimality, Stores, StoreSpec
from funcpipe.errors import Infeasible
from funcpipe.partitioner.analysis.front import pareto_front
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.partitioner.search.store_pairs import exact_over_stores
from funcpipe.partitioner.stores import store_choices
from tests.partitioner.instances import all_points, by_cost, draw_problem, front_of, platform, store

AUTO = Stores.of("auto")


def draw_stores(seed: int) -> tuple[StoreSpec, ...]:
    draw = random.Random(seed)
    return tuple(
        store(
            f"s{number}",
            latency_s=draw.choice([0.0, 0.002, 0.02, 0.3]),
            price_put_usd=draw.choice([0.0, 1e-6, 2e-5]),
            price_get_usd=draw.choice([0.0, 1e-7, 4e-6]),
            price_sent_usd_gb=draw.choice([0.0, 0.003]),
            price_received_usd_gb=draw.choice([0.0, 0.001]),
            price_usd_h=draw.choice([0.0, 0.0, 0.25]),
            bytes_s=draw.choice([None, None, 1e7]),
            shared_bytes_s=draw.choice([None, None, 6e7, 5e8]),
            largest_bytes=draw.choice([None, 4 * MB, 64 * MB]),
        )
        for number in range(draw.choice([1, 2]))
    )


def with_stores(problem: Problem, seed: int) -> Problem:
    return replace(problem, spec=replace(problem.spec, stores=draw_stores(seed)))


@pytest.mark.parametrize("seed", by_cost(2, 12, 300))
def test_the_best_pair_equals_enumeration(seed: int) -> None:
    problem = with_stores(draw_problem(seed), seed)
    every = [Stores(messages=m, sums=s) for m in problem.spec.store_names for s in problem.spec.store_names]
    choices, plans = store_choices(problem.spec, AUTO), []
    for stores in every:
        with suppress(Infeasible):
            plans.append(exhaustive(replace(problem, stores=stores)))
    if not plans:
        with pytest.raises(Infeasible):
            exact_over_stores(problem, choices)
        return
    expected = min(problem.goal.of_plan(plan) for plan in plans)
    found = exact_over_stores(problem, choices)
    assert found.solver
    assert found.solver.objective == pytest.approx(expected, rel=1e-8)
    assert found.solver.status is Optimality.OPTIMAL
    assert found.solver.bound is not None
    assert found.solver.bound <= found.solver.objective


@pytest.mark.parametrize("seed", by_cost(0, 5, 60))
def test_the_front_of_all_stores_equals_enumeration(seed: int) -> None:
    problem = with_stores(draw_problem(seed), seed)
    free = replace(problem, training=replace(problem.training, time_value=0.0))
    pairs = store_choices(problem.spec, AUTO)
    points = sorted(point for pair in pairs for point in all_points(replace(free, stores=pair)))
    training = replace(problem.training, stores=AUTO)
    if not points:
        with pytest.raises(Infeasible):
            pareto_front(problem.profile, problem.spec, training)
        return
    front = pareto_front(problem.profile, problem.spec, training)
    found = [(plan.estimate.iteration_s, plan.estimate.cost_usd) for plan in front.plans if plan.estimate]
    expected = front_of(points)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-7)


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
