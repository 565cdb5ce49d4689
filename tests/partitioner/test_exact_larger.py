"""The exact search on problems too large to price all plans, against a plain search for Pareto-best plans."""

from pathlib import Path

import numpy as np
import pytest

from funcpipe.core import ModelProfile, Sync, TrainingSpec, read
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.search import Search
from funcpipe.platforms.catalog import load_spec
from tests.examples import in_long_run
from tests.partitioner.instances import chain, platform
from tests.partitioner.oracles import by_plain_search, compare, optima
from tests.partitioner.plain_search import plain_points
from tests.partitioner.problems import larger


@pytest.mark.parametrize("seed", [*range(8), *in_long_run(range(8, 25))])
def test_exact_equals_a_plain_search(seed: int) -> None:
    compare(larger(seed), optima(f"larger {seed}"))


def test_a_lane_of_the_first_stage_does_not_hide_one_behind_it() -> None:
    """Once a lane in front was taken to be waited for by all stages before a node, and the best plan was dropped."""
    training = TrainingSpec(global_batch=16, replicas=(2,), time_value=30.0, sync=Sync.PIPELINED)
    problem = Problem(profile=chain(6, 2, 69), spec=platform(2), training=training)
    seconds, dollars = np.array(plain_points(problem)).T
    plan = exact(problem)
    assert plan.solver
    assert plan.solver.objective == pytest.approx((dollars + 30 / 3600 * seconds).min(), rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("tens", [100, 101])
def test_exact_equals_a_plain_search_on_twenty_more(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        compare(larger(seed), optima(f"larger {seed}"))


@pytest.mark.long
@pytest.mark.parametrize("tens", range(102, 130))
def test_exact_equals_a_plain_search_on_three_hundred(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        compare(larger(seed), by_plain_search(larger(seed), seed))


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
