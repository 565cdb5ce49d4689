"""Properties of the Cynthia-style model: its formulas are a reconstruction, so no number of the paper is tested."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core.provision import JobSpec
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.cynthia import (
    ClusterWorkload,
    Mode,
    cynthia,
    enumerated,
    fed_workers,
    fewest_workers,
    predict,
    search,
    utilisation,
)
from funcpipe.neighbours.provisioning.goal import Goal
from tests.neighbours.provisioning.random_markets import KIND, SERVER, WORK, cluster_goal, random_clusters

MODES = pytest.mark.parametrize("mode", list(Mode))


@given(rate=st.floats(0.5, 100), model_mb=st.floats(0.001, 1000), iteration=st.floats(1, 1000))
def test_both_modes_agree_on_one_worker_as_communication_vanishes(
    rate: float, model_mb: float, iteration: float
) -> None:
    """One overlaps it and the other does not: they differ by the communication of one worker, at most."""
    kind, work = replace(KIND, rate_vcpu=rate), ClusterWorkload(iteration_vcpu_s=iteration, model_mb=model_mb)
    bsp, asp = (predict(kind, 1, 1, work=work, server=SERVER, mode=mode, goal=cluster_goal()) for mode in Mode)
    assert bsp.iterations == pytest.approx(asp.iterations)
    exchange_s = 2 * model_mb / 1000
    assert -1e-9 <= asp.seconds / asp.iterations - bsp.seconds / bsp.iterations <= exchange_s * (1 + 1e-6)


@given(mode=st.sampled_from(Mode), deadline_s=st.floats(100, 1e6), later=st.floats(1, 10), faster=st.floats(1, 10))
def test_the_lower_bound_falls_with_time_and_speed(mode: Mode, deadline_s: float, later: float, faster: float) -> None:
    lower = fewest_workers(KIND, work=WORK, mode=mode, goal=cluster_goal(deadline_s))
    assert fewest_workers(KIND, work=WORK, mode=mode, goal=cluster_goal(deadline_s * later)) <= lower
    quick = replace(KIND, rate_vcpu=KIND.rate_vcpu * faster)
    assert fewest_workers(quick, work=WORK, mode=mode, goal=cluster_goal(deadline_s)) <= lower


@given(mode=st.sampled_from(Mode), deadline_s=st.floats(100, 1e5))
def test_fewer_workers_than_the_lower_bound_are_late(mode: Mode, deadline_s: float) -> None:
    goal = cluster_goal(deadline_s)
    lower = fewest_workers(KIND, work=WORK, mode=mode, goal=goal)
    if lower > 1:
        found = predict(KIND, lower - 1, 10**6, work=WORK, server=SERVER, mode=mode, goal=goal)
        assert found.seconds > deadline_s * (1 - 1e-9)


@given(workers=st.integers(1, 200), servers=st.integers(1, 8))
def test_servers_saturate(workers: int, servers: int) -> None:
    use = utilisation(KIND, workers, servers, work=WORK, server=SERVER)
    assert 0 < use <= 1
    assert utilisation(KIND, workers + 1, servers, work=WORK, server=SERVER) <= use
    assert utilisation(KIND, workers, servers + 1, work=WORK, server=SERVER) >= use
    feeds = fed_workers(KIND, work=WORK, server=SERVER) * servers
    assert (use == 1) == (workers <= feeds + 1e-9)
    if workers > feeds:
        assert use == pytest.approx(feeds / workers)


@MODES
def test_more_workers_than_servers_feed_bring_nothing(mode: Mode) -> None:
    feeds = math.ceil(fed_workers(KIND, work=WORK, server=SERVER))
    times = [
        predict(KIND, n, 1, work=WORK, server=SERVER, mode=mode, goal=cluster_goal()).seconds
        for n in (feeds, 2 * feeds)
    ]
    assert times[1] > 0.95 * times[0]


def test_asynchronous_workers_need_more_iterations() -> None:
    one, four = (
        predict(KIND, n, 1, work=WORK, server=SERVER, mode=Mode.ASP, goal=cluster_goal()).iterations for n in (1, 4)
    )
    assert one == pytest.approx(1000 / 0.5)
    assert four == pytest.approx(2 * one)


def test_epochs_need_the_same_samples_in_both_modes() -> None:
    goal = Goal(job=JobSpec(samples=1280, global_batch=128, epochs=3))
    for mode in Mode:
        assert predict(KIND, 4, 1, work=WORK, server=SERVER, mode=mode, goal=goal).iterations == pytest.approx(30)


def check_random_markets(number: int) -> None:
    missed = 0
    for seed in range(number):
        types, work, server, mode, goal = random_clusters(random.Random(seed))
        every = list(enumerated(types, work=work, server=server, mode=mode, goal=goal))
        made = [one for one in every if one.seconds <= goal.deadline_s]
        if not made:
            with pytest.raises(Infeasible, match="cannot be met"):
                cynthia(goal, types, work=work, server=server, mode=mode)
            continue
        missed += search(types, work=work, server=server, mode=mode, goal=goal) is None
        found = cynthia(goal, types, work=work, server=server, mode=mode)
        assert found.seconds <= goal.deadline_s
        bills = [one.usd for one in made if one.seconds == pytest.approx(found.seconds)]
        assert any(found.usd == pytest.approx(usd) for usd in bills)
    assert missed > 0  # the bounds alone leave nothing where servers are the limit


def test_random_markets_have_a_provision_where_there_is_one() -> None:
    check_random_markets(30)


@pytest.mark.long
def test_many_random_markets_have_a_provision_where_there_is_one() -> None:
    check_random_markets(200)


def test_a_market_without_machines_for_the_model_is_refused() -> None:
    with pytest.raises(Infeasible, match="no machine of the market has the memory"):
        cynthia(cluster_goal(), [], work=WORK, server=SERVER, mode=Mode.BSP)
