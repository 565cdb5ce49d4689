"""The exact search against every plan there is."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe.core import Optimality, Recompute, Sync, TrainingSpec, Wire
from funcpipe.errors import Infeasible, PlanError
from funcpipe.partitioner.cost import evaluate
from funcpipe.partitioner.exact import exact
from funcpipe.partitioner.exhaustive import exhaustive
from funcpipe.partitioner.problem import Problem
from tests.partitioner.instances import MB, chain, platform


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("skips", [0, 3])
def test_exact_equals_exhaustive(seed: int, skips: int) -> None:
    profile, spec = chain(4 + seed % 2, 2, seed, skips=skips), platform(2)
    weighted = TrainingSpec(global_batch=16, time_value=[0.0, 3.84, 245.76][seed % 3])
    plain = exhaustive(Problem(profile=profile, spec=spec, training=weighted))
    assert plain.estimate
    assert plain.solver
    middle = replace(weighted, deadline_s=0.8 * plain.estimate.iteration_s)
    dear = replace(weighted, budget_usd=1.3 * plain.estimate.cost_usd)
    for training in (weighted, middle, dear):
        try:
            expected = exhaustive(Problem(profile=profile, spec=spec, training=training))
        except Infeasible:
            with pytest.raises(Infeasible):
                exact(Problem(profile=profile, spec=spec, training=training))
            continue
        found = exact(Problem(profile=profile, spec=spec, training=training))
        assert found.solver
        assert expected.solver
        assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-9)
        assert found.solver.status is Optimality.OPTIMAL


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), wire=st.sampled_from(Wire), recompute=st.sampled_from(Recompute))
def test_exact_equals_exhaustive_whatever_the_settings(seed: int, wire: Wire, recompute: Recompute) -> None:
    profile = chain(4, 2, seed, skips=seed % 4)
    spec = platform(2, shared_cores=2 if seed % 5 == 0 else None)
    training = TrainingSpec(global_batch=8, time_value=10.0, wire=wire, recompute=recompute)
    problem = Problem(profile=profile, spec=spec, training=training)
    expected, found = exhaustive(problem), exact(problem)
    assert found.solver
    assert expected.solver
    assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-9)


def test_the_estimate_of_the_plan_is_the_cost_models() -> None:
    profile, spec = chain(5, 3, 7, skips=2), platform(3)
    plan = exact(Problem(profile=profile, spec=spec, training=TrainingSpec(global_batch=16, time_value=5.0)))
    assert plan.estimate == evaluate(replace(plan, estimate=None), profile, spec)
    assert plan.solver
    assert plan.estimate
    assert plan.solver.objective == pytest.approx(plan.estimate.cost_usd + 5 / 3600 * plan.estimate.iteration_s)
    assert [name for stage in plan.stages for name in stage.layers] == [layer.name for layer in profile.layers]


def test_replicas_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"3 replicas cannot share 4 micro-batches of 4 evenly; .* 1, 2, 4"):
        exact(Problem(profile=chain(3), spec=platform(), training=TrainingSpec(global_batch=16, replicas=(1, 3))))
    with pytest.raises(PlanError, match=r"18 is not a multiple of the profile's micro-batch 4; .* 16 and 20"):
        exact(Problem(profile=chain(3), spec=platform(), training=TrainingSpec(global_batch=18)))


def test_the_faster_synchronisation_is_chosen() -> None:
    profile, spec = chain(3, 2, 1), platform(2)
    slow = replace(spec, latency_s=3.0)
    training = TrainingSpec(global_batch=16, replicas=(4,), time_value=100.0)
    assert exact(Problem(profile=profile, spec=spec, training=training)).sync is Sync.PIPELINED
    assert exact(Problem(profile=profile, spec=slow, training=training)).sync is Sync.THREE_PHASE


def test_the_number_of_functions_is_limited() -> None:
    profile = chain(5, 2, 3)
    training = TrainingSpec(global_batch=16, time_value=300.0)
    plan = exact(Problem(profile=profile, spec=platform(2, max_functions=3), training=training))
    assert plan.workers <= 3
    oracle = exhaustive(Problem(profile=profile, spec=platform(2, max_functions=3), training=training))
    assert plan.solver
    assert oracle.solver
    assert plan.solver.objective == pytest.approx(oracle.solver.objective)


def test_no_plan_fits() -> None:
    large = replace(chain(3), base_memory_bytes=9000 * MB)
    with pytest.raises(Infeasible):
        exact(Problem(profile=large, spec=platform(), training=TrainingSpec(global_batch=16)))
