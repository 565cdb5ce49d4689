"""The exact search on problems too large to price all plans, against a plain search for Pareto-best plans."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from funcpipe.core import ModelProfile, Recompute, Sync, TrainingSpec, read
from funcpipe.partitioner.analysis.front import pareto_front
from funcpipe.partitioner.problem.goal import LIMIT_SLACK
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.search import Search
from funcpipe.platforms.catalog import load_spec
from tests.partitioner.instances import by_cost, chain, front_of, platform
from tests.partitioner.plain_search import plain_points


def drawn(draw: random.Random, seed: int) -> Problem:
    layers = draw.choice([6, 7, 8, 9])
    sizes = draw.choice([1, 2, 2, 3]) if layers < 8 else draw.choice([1, 2])
    batch = draw.choice([4, 8, 16, 32, 64])
    degree = draw.choice([degree for degree in (1, 2, 4, 8, 16) if batch % (4 * degree) == 0])
    spec = platform(
        sizes,
        shared_cores=draw.choice([None, None, None, None, 2]),
        latency_s=draw.choice([0.0, 0.04, 0.5]),
        price_put_usd=draw.choice([0.0, 5e-6, 2e-5]),
    )
    training = TrainingSpec(global_batch=batch, replicas=(degree,), recompute=draw.choice(list(Recompute)))
    profile = chain(layers, sizes, seed, skips=draw.choice([0, 0, 0, 1, 2]))
    if degree > 2 or layers > 6:  # the plain search keeps every way of synchronising of every stage
        training = replace(training, sync=Sync.STREAMED if degree > 2 else Sync.EXCHANGE)
    return Problem(profile=profile, spec=spec, training=training)


def compare(seed: int) -> None:
    draw = random.Random(seed)
    problem = drawn(draw, seed)
    limit_s = problem.goal.deadline_s * (1 + LIMIT_SLACK)
    points = [point for point in plain_points(problem) if point[0] <= limit_s]
    if not points:
        return
    seconds, dollars = np.array(points).T
    front = pareto_front(problem.profile, problem.spec, problem.training)
    found = [(plan.estimate.iteration_s, plan.estimate.cost_usd) for plan in front.plans if plan.estimate]
    np.testing.assert_allclose(found, front_of(points), rtol=1e-7)
    deadline_s = draw.uniform(seconds.min(), seconds[dollars.argmin()])
    budget_usd = draw.uniform(dollars.min(), dollars[seconds.argmin()])
    value = draw.choice([0.0, 1.0, 3.84, 30.0, 245.0, 1000.0])
    slack = 1 + LIMIT_SLACK  # a limit may be the time of a plan, which the two searches add up in another order
    cases = (
        (replace(problem.training, time_value=value), dollars + value / 3600 * seconds),
        (replace(problem.training, deadline_s=deadline_s), np.where(seconds <= deadline_s * slack, dollars, np.inf)),
        (replace(problem.training, budget_usd=budget_usd), np.where(dollars <= budget_usd * slack, seconds, np.inf)),
    )
    for training, objectives in cases:
        plan = exact(replace(problem, training=training))
        assert plan.solver
        assert plan.solver.objective == pytest.approx(objectives.min(), rel=1e-8)


@pytest.mark.parametrize("seed", by_cost(8, 25, 25))
def test_exact_equals_a_plain_search(seed: int) -> None:
    compare(seed)


def test_a_lane_of_the_first_stage_does_not_hide_one_behind_it() -> None:
    """Once a lane in front was taken to be waited for by all stages before a node, and the best plan was dropped."""
    training = TrainingSpec(global_batch=16, replicas=(2,), time_value=30.0, sync=Sync.PIPELINED)
    problem = Problem(profile=chain(6, 2, 69), spec=platform(2), training=training)
    seconds, dollars = np.array(plain_points(problem)).T
    plan = exact(problem)
    assert plan.solver
    assert plan.solver.objective == pytest.approx((dollars + 30 / 3600 * seconds).min(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("tens", [*range(2), *(pytest.param(tens, marks=pytest.mark.long) for tens in range(2, 30))])
def test_exact_equals_a_plain_search_on_three_hundred(tens: int) -> None:
    for seed in range(1000 + 10 * tens, 1010 + 10 * tens):
        compare(seed)


def test_a_quick_look_finds_a_plan_within_a_tight_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever limits the time of a search waits until there is a plan: the fastest one takes 6.04 s."""

    def searched(*args: object, **keywords: object) -> bool:
        raise AssertionError("a window was searched label by label before there was a plan")

    monkeypatch.setattr(Search, "_searched", searched)
    profile = read(ModelProfile, Path("experiments/profiles/bert-large.json"))
    training = TrainingSpec(global_batch=256, deadline_s=6.1, replicas=(32,))
    problem = Problem(profile=profile, spec=load_spec("aws-lambda"), training=training)
    search = Search(problem, incumbents_for(problem.goal), time_is_up=lambda: True)
    search.run()
    assert search.found[-1].iteration_s <= 6.1
