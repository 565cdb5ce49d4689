"""How fast a platform lets functions start."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core.settings import overlap_s
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.launch_rate import LaunchRate, launched_after_s
from tests.platforms.clock import Clock

LOCAL = load_spec("local")


@given(
    asked=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), min_size=1, max_size=30), most=st.integers(1, 50)
)
def test_no_more_functions_start_than_the_platform_lets(asked: list[tuple[float, int]], most: int) -> None:
    clock = Clock()
    rate = LaunchRate(dataclasses.replace(LOCAL, launches_10s=most), clock=clock, sleep=clock.sleep)
    started = list[tuple[float, int]]()
    for pause_s, wanted in asked:
        clock.now_s += pause_s
        functions = min(wanted, most)
        rate.take(functions)
        started.append((clock.now_s, functions))
    assert min(clock.pauses, default=1.0) > 0
    for first, last in itertools.combinations_with_replacement(range(len(started)), 2):
        count = sum(functions for _, functions in started[first : last + 1])
        assert count <= most + (started[last][0] - started[first][0]) * most / 10 + 1e-3


@given(functions=st.integers(1, 60), most=st.none() | st.integers(1, 20))
def test_the_last_of_many_functions_starts_as_late_as_is_predicted(functions: int, most: int | None) -> None:
    spec, clock = dataclasses.replace(LOCAL, launches_10s=most), Clock()
    rate, starts_s = LaunchRate(spec, clock=clock, sleep=clock.sleep), list[float]()
    for _ in range(functions):
        rate.take(1)
        starts_s.append(clock.now_s - 1000.0)
    last_s, mean_s = launched_after_s(functions, spec)
    assert last_s == pytest.approx(starts_s[-1], abs=1e-4)
    assert mean_s == pytest.approx(sum(starts_s) / functions, abs=1e-4)


@given(functions=st.integers(1, 60), most=st.integers(1, 20), step_s=st.floats(0.1, 30), life_s=st.floats(60, 900))
def test_successors_that_functions_start_at_one_age_between_steps_wait_for_a_step_at_most(
    functions: int, most: int, step_s: float, life_s: float
) -> None:
    """`overlap_s` keeps two."""
    spec, clock = dataclasses.replace(LOCAL, launches_10s=most), Clock()
    client, ages_s = LaunchRate(spec, clock=clock, sleep=clock.sleep), list[float]()
    for _ in range(functions):
        client.take(1)
        ages_s.append(clock.now_s + life_s)
    clock = Clock()
    platform = LaunchRate(spec, clock=clock, sleep=clock.sleep)
    for old_s in ages_s:
        clock.now_s = max(clock.now_s, step_s * math.ceil(old_s / step_s))
        platform.take(1)
        assert clock.now_s - old_s <= step_s + 1e-3
    assert overlap_s(0.0, step_s) == 2 * step_s
