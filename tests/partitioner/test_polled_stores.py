"""Stores that do not tell of new objects: forms against the simulator, the search against every plan there is."""

from dataclasses import replace
from statistics import mean

import pytest

from funcpipe.analysis.predict import forecast
from funcpipe.core import Plan, PlatformSpec, ScheduleKind, Streams, Sync, SyncWay
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.cost.waits import found_late_s
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.simulator.disturbances import Disturbances
from tests.analysis.test_predict import summing
from tests.examples import in_long_run
from tests.partitioner.instances import draw_problem
from tests.partitioner.test_request_limits import PROFILE, plan

SPEC = load_spec("aws-lambda").without_request_limits()
WAYS = (
    SyncWay(Sync.EXCHANGE, Streams(2, 1, 1)),
    SyncWay(Sync.THREE_PHASE),
    SyncWay(Sync.PIPELINED),
    SyncWay(Sync.ALL_REDUCE),
    SyncWay(Sync.STREAMED, Streams(2, 3, 1)),
    SyncWay(Sync.TREE, Streams(1, 3, 1)),
    SyncWay(Sync.TREE, Streams(4, 2, 4)),
)


def played_s(chosen: tuple[Plan, object], spec: PlatformSpec, plays: int = 8) -> float:
    seeds = (Disturbances(seed=seed) for seed in range(plays))
    return mean(forecast(*chosen, spec, disturbances=each).duration_s for each in seeds)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("replicas", [4, 8])
@pytest.mark.parametrize(("size", "latency_s"), [(20_000, 0.04), (1_000_000, 0.04), (20_000_000, 0.04), (20_000, 1.0)])
def test_sums_take_as_long_as_they_are_played(size: int, latency_s: float, replicas: int, way: SyncWay) -> None:
    """They take up to half as long again. `test_predict` has by how much the forms are off without polls."""
    chosen, told = summing(size, replicas, way), replace(SPEC, latency_s=latency_s)
    spec = replace(told, polled=True)
    found_s = evaluate(*chosen, spec).iteration_s
    assert found_s == pytest.approx(played_s(chosen, spec), rel=0.08)
    assert found_s > evaluate(*chosen, told).iteration_s


@pytest.mark.parametrize("replicas", [16, 64, *in_long_run([128])])
@pytest.mark.parametrize("size", [20_000, 20_000_000])
def test_so_do_sums_in_groups(size: int, replicas: int) -> None:
    chosen, spec = summing(size, replicas, SyncWay(Sync.HIERARCHICAL, Streams(1, 2, 1))), replace(SPEC, polled=True)
    found_s = evaluate(*chosen, spec).iteration_s
    assert found_s == pytest.approx(played_s(chosen, spec, plays=2), rel=0.08)
    assert found_s > 1.02 * evaluate(*chosen, SPEC).iteration_s


@pytest.mark.parametrize("schedule", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize("replicas", [1, 4])
def test_so_does_a_pipeline(replicas: int, schedule: ScheduleKind) -> None:
    chosen = replace(plan(replicas, 3, SyncWay(Sync.STREAMED, Streams(2, 2, 1))), schedule=schedule)
    spec = replace(SPEC, polled=True, latency_s=0.2)
    off, off_told = (
        evaluate(chosen, PROFILE, each).iteration_s / played_s((chosen, PROFILE), each) - 1
        for each in (spec, replace(spec, polled=False))
    )
    assert abs(off) <= abs(off_told) + 0.05


@pytest.mark.parametrize("seed", [2, 10, *in_long_run([6])])
def test_the_search_finds_what_enumeration_finds(seed: int) -> None:
    problem = draw_problem(seed)
    problem = replace(problem, spec=replace(problem.spec, polled=True))
    found = exact(problem)
    assert problem.goal.of_plan(found) == pytest.approx(problem.goal.of_plan(exhaustive(problem)), rel=1e-9)


def test_bodies_pass_while_others_have_not_been_found() -> None:
    assert found_late_s(0.0, 3, 1.0) == 0
    assert found_late_s(2.0, 1, 5.0) == pytest.approx(1.0)
    assert found_late_s(1.0, 3, 0.0) > found_late_s(1.0, 3, 0.5) > found_late_s(1.0, 3, 9.0) == pytest.approx(0.25)
