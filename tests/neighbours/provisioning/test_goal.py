"""The chance to miss a deadline, against simulated jobs."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core.market import MONTH_S, Machine
from funcpipe.neighbours.provisioning.goal import aimed_deadline_s, loss_rate_s, miss_chance


def test_the_chance_is_that_of_simulated_jobs() -> None:
    draw, late, jobs = random.Random(1), 0, 20_000
    seconds, deadline_s, losses_s, delay_s = 1000.0, 1150.0, 1 / 800, 100.0
    for _ in range(jobs):
        took, at = draw.gauss(seconds, 0.05 * seconds), draw.expovariate(losses_s)
        while at < seconds:
            took += delay_s
            at += draw.expovariate(losses_s)
        late += took > deadline_s
    found = miss_chance(seconds, deadline_s, spread=0.05, losses_s=losses_s, delay_s=delay_s)
    assert found == pytest.approx(late / jobs, abs=0.01)


@given(allowed=st.floats(0.001, 0.5), spread=st.floats(0.001, 0.5))
def test_a_job_as_long_as_the_aim_misses_as_often_as_allowed(allowed: float, spread: float) -> None:
    aim_s = aimed_deadline_s(1000.0, allowed, spread)
    assert aim_s <= 1000
    assert miss_chance(aim_s, 1000.0, spread=spread) == pytest.approx(allowed, rel=1e-6)


def test_without_spread_or_deadline() -> None:
    assert miss_chance(10, None, spread=0.1) is None
    assert miss_chance(10, 11, spread=0) == 0
    assert miss_chance(12, 11, spread=0) == 1
    assert math.isinf(aimed_deadline_s(None, 0.05, 0.1))
    assert aimed_deadline_s(100, 0, 0.1) == 100


def test_a_month_loses_as_many_machines_as_the_band_says() -> None:
    machine = Machine(
        name="m", vcpu=1, memory_mb=1, network_mb_s=1, on_demand_usd_h=1, spot_usd_h=0.5, interruption=0.2
    )
    assert 1 - math.exp(-loss_rate_s(machine) * MONTH_S) == pytest.approx(0.2)
