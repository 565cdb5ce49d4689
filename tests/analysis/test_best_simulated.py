"""The best of a few plans by simulation, against the search and the simulator themselves."""

from dataclasses import replace

import pytest

from funcpipe.analysis import improve as module
from funcpipe.analysis.improve import best_simulated
from funcpipe.analysis.predict import predict
from funcpipe.core import (
    Estimate,
    ModelProfile,
    Numerics,
    Optimality,
    Plan,
    PlatformSpec,
    ScheduleKind,
    SolverReport,
    TrainingSpec,
)
from funcpipe.partitioner.optimize import best_plans, optimize
from tests.partitioner.instances import chain, platform

CASES = [(chain(4, 3, seed, skips=seed % 2), platform(3), seed) for seed in range(3)]
WANTED = TrainingSpec(global_batch=32, time_value=30.0)


def solved(plan: Plan) -> SolverReport:
    assert plan.solver is not None
    return plan.solver


def estimated(plan: Plan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


@pytest.mark.parametrize(("profile", "spec", "seed"), CASES)
def test_the_first_plan_is_the_best_one_and_the_others_differ(
    profile: ModelProfile, spec: PlatformSpec, seed: int
) -> None:
    plans = best_plans(profile, spec, WANTED, 5)
    best = optimize(profile, spec, WANTED)
    assert plans[0].stages == best.stages
    assert solved(plans[0]).status is Optimality.OPTIMAL
    objectives = [solved(plan).objective for plan in plans]
    assert objectives == sorted(objectives)
    assert len(plans) > 1
    shapes = {(p.replicas, p.schedule, tuple(stage.first for stage in p.stages)) for p in plans}
    assert len(shapes) == len(plans)
    assert all(solved(plan).bound is None for plan in plans[1:])


def test_plans_that_differ_in_their_schedule_alone_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, spec, _ = CASES[0]
    best = optimize(profile, spec, WANTED)
    other = replace(best, schedule=next(kind for kind in ScheduleKind if kind is not best.schedule))
    monkeypatch.setattr("funcpipe.partitioner.optimize.search_best_plans", lambda *_, **__: [best, other])
    assert [plan.schedule for plan in best_plans(profile, spec, WANTED, 2)] == [best.schedule, other.schedule]


def test_plans_with_sums_in_8_bits_and_in_16_are_compared() -> None:
    profile, spec, _ = CASES[0]
    training = replace(WANTED, numerics=Numerics.INT8, replicas=(2,))
    plans = best_plans(profile, spec, training, 8)
    assert plans[0].stages == optimize(profile, spec, training).stages
    assert len({plan.wire_sync for plan in plans}) == 2


@pytest.mark.parametrize(("profile", "spec", "seed"), CASES)
def test_the_plan_taken_is_the_best_of_those_simulated(profile: ModelProfile, spec: PlatformSpec, seed: int) -> None:
    chosen = best_simulated(profile, spec, WANTED, 5)
    plans = best_plans(profile, spec, WANTED, 5)
    objectives = []
    for plan in plans:
        seconds, estimate = predict(plan, profile, spec).duration_s, estimated(plan)
        objectives.append(estimate.usd_in(seconds) + WANTED.time_value / 3600 * seconds)
    report = solved(chosen)
    assert chosen.stages == plans[objectives.index(min(objectives))].stages
    assert report.simulated_plans == len(plans)
    assert report.simulated_s == pytest.approx(predict(chosen, profile, spec).duration_s)
    assert report.simulated_s is not None
    assert report.simulated_usd is not None
    assert report.simulated_usd + WANTED.time_value / 3600 * report.simulated_s == pytest.approx(min(objectives))


def test_a_plan_that_only_the_simulator_prefers_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, spec, _ = CASES[0]
    plans = best_plans(profile, spec, WANTED, 2)
    slow = {id(plans[0]): 2.0}
    monkeypatch.setattr(module, "best_plans", lambda *_, **__: plans)
    monkeypatch.setattr(
        module, "_seconds_and_dollars", lambda plan, _: (slow.get(id(plan), 1.0), slow.get(id(plan), 1.0))
    )
    chosen = best_simulated(profile, spec, WANTED, 2)
    report, proof = solved(chosen), solved(plans[0])
    assert chosen.stages == plans[1].stages
    assert report.status is Optimality.FEASIBLE
    assert report.bound == proof.bound
    assert report.gap == pytest.approx(1 - proof.objective / report.objective, abs=1e-8)


def test_where_no_plan_keeps_the_limits_when_simulated_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, spec, _ = CASES[0]
    late = replace(WANTED, deadline_s=estimated(optimize(profile, spec, WANTED)).iteration_s * 1.5)
    monkeypatch.setattr(module, "_seconds_and_dollars", lambda *_: (1e6, 1.0))
    chosen = best_simulated(profile, spec, late, 3)
    assert chosen.stages == optimize(profile, spec, late).stages
    assert solved(chosen).simulated_s == 1e6


def test_a_longer_iteration_costs_more_for_functions_and_for_hours_of_stores() -> None:
    profile, spec, _ = CASES[0]
    estimate = replace(
        estimated(optimize(profile, spec, WANTED)), iteration_s=2.0, compute_usd=3.0, hours_usd=1.0, request_usd=5.0
    )
    assert estimate.usd_in(2.0) == pytest.approx(3.0 + 1.0 + 5.0)
    assert estimate.usd_in(4.0) == pytest.approx(6.0 + 2.0 + 5.0)
