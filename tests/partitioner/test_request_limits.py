"""Requests a second of a store: closed forms against the simulator, the search against every plan there is."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.analysis.predict import forecast
from funcpipe.core import (
    ModelProfile,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Stage,
    Streams,
    Sync,
    SyncWay,
    TrainingSpec,
    Wire,
    read,
)
from funcpipe.errors import Infeasible
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.cost.stores import pace_of, requests_each, sync_requests
from funcpipe.partitioner.cost.sync_time import hierarchical_s, limit_s
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.mip.chain_sync import paced_lines, sync_s
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.platforms.catalog import load_spec
from tests.analysis.test_predict import summing
from tests.examples import in_long_run
from tests.partitioner.instances import chain, draw_problem, platform

PROFILE = read(ModelProfile, Path(__file__).parents[2] / "experiments/profiles/resnet101.json")
SPEC = load_spec("aws-lambda")
CUTS = {1: (0, 30), 2: (0, 21, 30), 3: (0, 18, 25, 30)}


def plan(replicas: int, stages: int, way: SyncWay) -> Plan:
    """ResNet-101 on functions of the largest size, with four micro-batches for each replica."""
    size = SPEC.sizes[-1]
    return Plan(
        global_batch=4 * replicas * PROFILE.micro_batch,
        micro_batch=PROFILE.micro_batch,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=way.sync,
        streams=way.streams,
        wire=Wire.FP32,
        stages=tuple(
            Stage(first=first, stop=stop, size=size.name, memory_mb=size.memory_mb)
            for first, stop in itertools.pairwise(CUTS[stages])
        ),
    )


def limited(chosen: Plan, share: float) -> PlatformSpec:
    """A store that takes the requests of a stage's sums in `share` of the seconds that a step takes without limits."""
    free_s = evaluate(chosen, PROFILE, SPEC).iteration_s
    puts, gets = (each / min(chosen.replicas, 16) for each in sync_requests(chosen.ways[0], chosen.replicas))
    return replace(SPEC, puts_s=puts / (share * free_s), gets_s=gets / (share * free_s))


def off(replicas: int, stages: int, way: SyncWay, share: float) -> tuple[float, float]:
    """By how much the form is longer than what is played, and how much longer the step is than without limits."""
    chosen = plan(replicas, stages, way)
    spec = limited(chosen, share)
    form_s, played_s = evaluate(chosen, PROFILE, spec).iteration_s, forecast(chosen, PROFILE, spec).duration_s
    return form_s / played_s - 1, played_s / evaluate(chosen, PROFILE, SPEC).iteration_s


def streamed(rounds: int, groups: int, merged: int) -> SyncWay:
    return SyncWay(Sync.STREAMED, Streams(rounds, groups, merged))


def exchanged(rounds: int) -> SyncWay:
    return SyncWay(Sync.EXCHANGE, Streams(rounds, 1, 1))


@pytest.mark.parametrize(
    ("replicas", "way"),
    [(2, exchanged(24)), (2, exchanged(48)), (8, exchanged(24)), (8, streamed(24, 2, 2))],
    ids=str,
)
@pytest.mark.parametrize("stages", [1, 3, *in_long_run([2])])
def test_a_plan_whose_requests_wait_takes_as_long_as_it_is_played(replicas: int, way: SyncWay, stages: int) -> None:
    for share in (0.5, 1.0):
        more, longer = off(replicas, stages, way, share)
        assert abs(more) <= 0.05, (share, more)
    assert longer > (1.05 if replicas == 8 and way.sync is Sync.EXCHANGE else 1.3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "way"), [(32, streamed(2, 4, 2)), (32, streamed(6, 8, 1)), (128, streamed(1, 8, 1))], ids=str
)
@pytest.mark.parametrize("stages", [1, 2])
def test_so_does_one_of_many_replicas(replicas: int, way: SyncWay, stages: int) -> None:
    more, longer = off(replicas, stages, way, 0.5)
    assert abs(more) <= 0.05
    assert longer > 1.05


@pytest.mark.parametrize(("replicas", "cut"), [(16, Streams(1, 4, 1)), (16, Streams(4, 3, 4)), (64, Streams(1, 11, 1))])
def test_so_does_a_tree_of_which_many_ask_for_the_same_sums(replicas: int, cut: Streams) -> None:
    for size in (100_000, 2_000_000):
        chosen, profile = summing(size, replicas, SyncWay(Sync.TREE, cut))
        free_s = forecast(chosen, profile, SPEC).duration_s
        for rate in (20.0, 200.0):
            spec = replace(SPEC, puts_s=rate, gets_s=rate)
            played_s = forecast(chosen, profile, spec).duration_s
            assert evaluate(chosen, profile, spec).iteration_s == pytest.approx(played_s, rel=0.08)
            assert played_s > 1.5 * free_s or rate == 200


def test_a_plan_below_the_limits_takes_what_it_takes_without() -> None:
    for way, stages in itertools.product((streamed(4, 1, 2), exchanged(8), SyncWay(Sync.PIPELINED)), (1, 3)):
        chosen = plan(8, stages, way)
        assert evaluate(chosen, PROFILE, SPEC) == evaluate(chosen, PROFILE, SPEC.without_request_limits())
        free = forecast(chosen, PROFILE, SPEC.without_request_limits())
        assert list(forecast(chosen, PROFILE, SPEC).ends_s) == list(free.ends_s)


def test_an_exchange_takes_at_least_its_requests_at_the_rate_of_an_account() -> None:
    chosen = plan(8, 2, streamed(4, 1, 2))
    requests = sum(sync_requests(chosen.ways[0], 8)) * len(chosen.stages)
    spec = replace(SPEC.without_request_limits(), requests_s=40)
    for seconds in (evaluate(chosen, PROFILE, spec).iteration_s, forecast(chosen, PROFILE, spec).duration_s):
        assert seconds > 0.9 * requests / 40 > evaluate(chosen, PROFILE, SPEC).iteration_s


def test_explain_says_how_long_requests_wait() -> None:
    chosen = plan(8, 2, streamed(24, 2, 2))
    spec = limited(chosen, 1.0)
    longer_s = evaluate(chosen, PROFILE, spec).iteration_s - evaluate(chosen, PROFILE, SPEC).iteration_s
    binding = explain(chosen, PROFILE, spec, TrainingSpec(global_batch=chosen.global_batch, time_value=30.0)).binding
    assert f"requests wait for their store: an iteration takes {longer_s:.3g} s longer" in binding


LIMITS = ({"puts_s": 3.0, "gets_s": 5.0}, {"gets_s": 20.0}, {"requests_s": 60.0}, {"puts_s": 5.0, "requests_s": 100.0})


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("seed", [2, 10, *in_long_run([6])])
def test_the_search_finds_what_enumeration_finds(seed: int, limits: dict[str, float]) -> None:
    problem = draw_problem(seed)
    problem = replace(problem, spec=replace(problem.spec, **limits))  # type: ignore[arg-type]
    try:
        best = exhaustive(problem)
    except Infeasible:
        with pytest.raises(Infeasible):
            exact(problem)
        return
    assert problem.goal.of_plan(exact(problem)) == pytest.approx(problem.goal.of_plan(best), rel=1e-9)


def test_the_papers_form_has_lines_whose_greatest_is_the_time_of_synchronising() -> None:
    spec = platform(2, puts_s=4.0, gets_s=6.0)
    problem = Problem(profile=chain(4), spec=spec, training=TrainingSpec(global_batch=32))
    for sync, replicas in itertools.product((Sync.THREE_PHASE, Sync.PIPELINED), (3, 4, 5)):
        setting, size = problem.setting(replicas, sync, ScheduleKind.GPIPE), spec.sizes[0]
        pace = pace_of(setting.sum_store, replicas, replicas)
        fixed_s = sync_s(setting, size, 0.0)
        lines = paced_lines(setting, size, least_mb=0.0, most_mb=100.0)
        lines.append((fixed_s, sync_s(setting, size, 1.0) - fixed_s))
        assert sync_s(setting, size, 0.01, pace) > sync_s(setting, size, 0.01)
        for megabytes in (0.0, 0.01, 0.3, 1.0, 3.0, 10.0, 100.0):
            greatest_s = max(fixed_s + slope_s * megabytes for fixed_s, slope_s in lines)
            assert greatest_s == pytest.approx(sync_s(setting, size, megabytes, pace), rel=1e-9)


@pytest.mark.parametrize(("sharded", "expected"), [(False, Sync.TREE), (True, Sync.HIERARCHICAL)])
@pytest.mark.parametrize("layers", [1, 2])
def test_where_requests_are_limited_many_replicas_sum_in_groups(layers: int, sharded: bool, expected: Sync) -> None:
    """Enumeration says so too. In a hierarchy, a replica makes half of the requests of the leanest stream; in a tree 3
    for each round, but no replica sums a part for all others, whose optimiser it could divide.
    """
    spec = replace(platform(latency_s=0.01), requests_s=40.0)
    training = TrainingSpec(global_batch=64, replicas=(16,), time_value=30.0, recompute=Recompute.NEVER)
    problem = Problem(profile=chain(layers), spec=spec, training=replace(training, shard_optimizer=sharded))
    found, best = exact(problem), exhaustive(problem)
    assert problem.goal.of_plan(found) == pytest.approx(problem.goal.of_plan(best), rel=1e-9)
    assert {way.sync for way in found.ways} == {expected}


def test_a_hierarchy_of_128_replicas_makes_a_quarter_of_the_requests_near_the_limit() -> None:
    """60 MB; streams make 270 for each replica. At most 1.3 of the limit with four latencies."""
    puts, gets = requests_each(Sync.HIERARCHICAL, 128, Streams(1, 15, 1))
    assert (puts, gets) == (18, 44)
    assert puts + gets < 0.25 * sum(requests_each(Sync.STREAMED, 128, Streams(1, 15, 1)))
    rate, latency_s = 70e6, 0.04
    seconds = hierarchical_s(60e6, 128, rate, rate, latency_s, Streams(1, 15, 1))
    assert seconds < 1.3 * limit_s(60e6, 128, rate, rate, 2 * latency_s)
