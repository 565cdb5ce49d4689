"""The exact search against every plan there is."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Optimality, Pins, Plan, Recompute, Sync, TrainingSpec, from_text, to_text
from funcpipe.errors import Infeasible, PlanError
from funcpipe.partitioner.alternatives import second_best
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.search import Search
from funcpipe.partitioner.search.spaces import Space, all_spaces
from tests.examples import at_most, in_long_run
from tests.partitioner.instances import MB, all_points, chain, draw_problem, platform
from tests.partitioner.oracles import compare, in_all_modes, optima
from tests.partitioner.problems import divided


def best(problem: Problem, policy: object) -> Plan | None:
    assert callable(policy)
    try:
        found = policy(problem)
    except Infeasible:
        return None
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("seed", [*range(20), *in_long_run(range(20, 30))])
def test_exact_equals_exhaustive_in_all_modes(seed: int) -> None:
    compare(draw_problem(seed), optima(f"all modes {seed}"))


@pytest.mark.parametrize("seed", range(8))
def test_exact_equals_exhaustive_with_an_optimiser_divided_over_replicas(seed: int) -> None:
    compare(divided(seed), optima(f"divided {seed}"))


@pytest.mark.long
@pytest.mark.parametrize("tens", [100, 101])
def test_exact_equals_exhaustive_on_twenty_more(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        compare(draw_problem(seed), optima(f"all modes {seed}"))


@pytest.mark.long
@pytest.mark.parametrize("tens", [3, *range(102, 150)])
def test_exact_equals_exhaustive_on_five_hundred(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        compare(draw_problem(seed), in_all_modes(draw_problem(seed), seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 80))
def test_exact_equals_exhaustive_with_more_optimisers_divided_over_replicas(seed: int) -> None:
    compare(divided(seed), in_all_modes(divided(seed), seed))


@at_most(12)
@given(layers=st.integers(6, 12), seed=st.integers(0, 10_000), skips=st.integers(0, 3), batch=st.sampled_from([16, 48]))
def test_no_known_plan_beats_the_optimum(layers: int, seed: int, skips: int, batch: int) -> None:
    profile, spec = chain(layers, 3, seed, skips=skips), platform()
    problem = Problem(profile=profile, spec=spec, training=TrainingSpec(global_batch=batch, time_value=20.0))
    optimum = exact(problem)
    assert optimum.solver
    heavy = replace(problem, training=replace(problem.training, time_value=200.0))
    dear = exact(heavy)
    assert optimum.estimate
    assert dear.estimate
    slack = 1 + 1e-8
    assert optimum.solver.objective <= problem.goal.of_plan(dear) * slack
    assert dear.estimate.iteration_s <= optimum.estimate.iteration_s * slack
    assert optimum.estimate.cost_usd <= dear.estimate.cost_usd * slack


@at_most(10)
@given(seed=st.integers(0, 10_000), skips=st.integers(0, 3))
def test_looser_limits_never_make_plans_worse(seed: int, skips: int) -> None:
    problem = Problem(
        profile=chain(6, 3, seed, skips=skips), spec=platform(), training=TrainingSpec(global_batch=16, time_value=0.0)
    )
    cheapest = exact(problem)
    assert cheapest.estimate
    costs = []
    for share in (0.6, 0.75, 0.9, 1.1):
        limited = replace(problem.training, deadline_s=share * cheapest.estimate.iteration_s)
        plan = best(replace(problem, training=limited), exact)
        costs.append(plan.estimate.cost_usd if plan and plan.estimate else np.inf)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == pytest.approx(cheapest.estimate.cost_usd, rel=1e-8)


def test_the_estimate_of_the_plan_is_the_cost_models() -> None:
    problem = Problem(
        profile=chain(5, 3, 7, skips=2), spec=platform(3), training=TrainingSpec(global_batch=16, time_value=5.0)
    )
    plan = exact(problem)
    assert plan.estimate == evaluate(replace(plan, estimate=None), problem.profile, problem.spec)
    assert plan.solver
    assert plan.estimate
    assert plan.solver.objective == pytest.approx(plan.estimate.cost_usd + 5 / 3600 * plan.estimate.iteration_s)
    assert [name for stage in plan.stages for name in stage.layers] == [f"layer{i}" for i in range(5)]


@pytest.mark.parametrize("seed", range(8))
def test_the_second_best_plan(seed: int) -> None:
    problem = draw_problem(seed + 50)
    first = best(problem, exact)
    if first is None:
        return
    # the same stages in another order of micro-batches, or in another way of synchronising, are no other plan
    problem = replace(problem, training=replace(problem.training, schedule=first.schedule, sync=Sync.PIPELINED))
    first = best(problem, exact)
    assert first is not None
    objectives = [problem.goal.objective(np.array(s), np.array(c)) for s, c in all_points(problem)]
    other = second_best(problem, first)
    if other is None:
        assert len(objectives) == 1
        return
    assert other.stages != first.stages or (other.replicas, other.sync) != (first.replicas, first.sync)
    # exhaustive prices every way to recompute, the search only those that are needed: it may miss worse ones
    assert problem.goal.of_plan(other) >= sorted(objectives)[1] * (1 - 1e-9)
    if problem.training.recompute.value == "never":
        assert problem.goal.of_plan(other) == pytest.approx(float(sorted(objectives)[1]), rel=1e-8)


def test_when_time_is_up_the_bound_is_honest() -> None:
    problem = Problem(profile=chain(12, 3, 3), spec=platform(), training=TrainingSpec(global_batch=64, time_value=90.0))
    optimum = exact(problem)
    assert optimum.solver
    for looks in (0, 1, 3, 10, 30):
        left = iter(range(looks))
        search = Search(problem, incumbents_for(problem.goal), lambda left=left: next(left, None) is None)  # type: ignore[misc]
        search.run()
        assert search.found
        assert search.bound <= optimum.solver.objective * (1 + 1e-9)
        assert problem.goal.of_plan(search.found[-1].plan(problem)) >= optimum.solver.objective * (1 - 1e-9)


def test_a_time_limit_holds_while_the_spaces_are_looked_at_for_the_first_time() -> None:
    """Once the limit was not looked at before all spaces had been."""
    problem = Problem(profile=chain(6, 3, 3), spec=platform(), training=TrainingSpec(global_batch=64, time_value=90.0))
    seen: list[Space] = []

    def counted() -> Iterator[Space]:
        for space in all_spaces(problem):
            seen.append(space)
            yield space

    search = Search(problem, incumbents_for(problem.goal), lambda: True, among=counted())
    search.run()
    assert len(seen) == 2  # the one in which a plan was found, and the one that is left out
    assert search.found
    assert not search.complete
    assert search.bound == 0.0  # all that is known of a space that was not looked at


@pytest.mark.parametrize("limit_s", [0.0, 2.0, 1e6])
def test_a_plan_that_is_found_in_time_is_called_optimal_only_with_a_proof(limit_s: float) -> None:
    problem = Problem(profile=chain(6, 3, 3), spec=platform(), training=TrainingSpec(global_batch=64, time_value=90.0))
    optimum = exact(problem).solver
    assert optimum
    ticks = itertools.count()  # a second passes whenever somebody looks at the clock
    found = exact(problem, time_limit_s=limit_s, clock=lambda: float(next(ticks))).solver
    assert found
    assert found.bound is not None
    assert found.gap is not None
    assert found.bound <= optimum.objective * (1 + 1e-9)
    assert found.gap == pytest.approx((found.objective - found.bound) / found.objective)
    assert (found.status is Optimality.OPTIMAL) == (limit_s == 1e6)
    if limit_s < 1e6:
        assert found.gap == 1.0


def test_replicas_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"3 replicas cannot share 4 micro-batches of 4 evenly; .* 1, 2, 4"):
        Problem(profile=chain(3), spec=platform(), training=TrainingSpec(global_batch=16, replicas=(1, 3)))
    with pytest.raises(PlanError, match=r"18 is not a multiple of the profile's micro-batch 4; .* 16 and 20"):
        Problem(profile=chain(3), spec=platform(), training=TrainingSpec(global_batch=18))


def test_the_faster_synchronisation_is_chosen() -> None:
    """None of those that can be asked for is better, whatever a request takes."""
    profile, training = chain(3, 2, 1), TrainingSpec(global_batch=16, replicas=(4,), time_value=100.0)
    for spec in (platform(2), platform(2, latency_s=3.0)):
        chosen = optimize(profile, spec, training)
        assert chosen.solver
        for sync in Sync:
            asked = optimize(profile, spec, replace(training, sync=sync))
            assert asked.sync is sync
            assert asked.solver
            assert chosen.solver.objective <= asked.solver.objective * (1 + 1e-9)


def test_forty_layers_are_planned_with_a_proof() -> None:
    training = TrainingSpec(global_batch=64, time_value=3.84)
    problem = Problem(profile=chain(40, 8, 1), spec=platform(8), training=training)
    plan = exact(problem)
    assert plan.solver
    assert plan.solver.status is Optimality.OPTIMAL


def test_no_plan_fits() -> None:
    large = replace(chain(3), base_memory_bytes=9000 * MB)
    with pytest.raises(Infeasible):
        exact(Problem(profile=large, spec=platform(), training=TrainingSpec(global_batch=16)))


def test_fewer_stages_than_sizes_fit() -> None:
    """Once the comparison of sizes ran off the end of a short list of stages."""
    spec = platform(6)
    heavy = replace(chain(2, 6).layers[0], constant_bytes=4700 * 2**20)
    profile = replace(chain(2, 6), layers=(heavy, chain(2, 6).layers[1]))
    training = TrainingSpec(global_batch=4, recompute=Recompute.NEVER)
    problem = Problem(
        profile=profile, spec=spec, training=training, pins=Pins(cuts=("layer1",), sizes={"layer1": "1024MB"})
    )
    plan, expected = exact(problem), exhaustive(problem)
    assert plan.solver is not None
    assert expected.solver is not None
    assert [stage.size for stage in plan.stages] == ["6144MB", "1024MB"]
    assert plan.solver.objective == pytest.approx(expected.solver.objective)


def test_layers_that_take_no_time() -> None:
    """Once the search divided by the seconds of the fastest plan."""
    profile = chain(4, 2)
    still = [replace(layer, forward_s=(0.0, 0.0), backward_s=(0.0, 0.0)) for layer in profile.layers]
    profile = replace(profile, layers=tuple(still))
    training = TrainingSpec(global_batch=16, time_value=10.0, replicas=(1,))
    for spec in (platform(2), platform(2, max_functions=1)):
        problem = Problem(profile=profile, spec=spec, training=training, pins=Pins(max_memory_mb=1024))
        plan, expected = exact(problem), exhaustive(problem)
        assert plan.solver is not None
        assert expected.solver is not None
        assert plan.solver.objective == pytest.approx(expected.solver.objective)
    with pytest.raises(Infeasible):
        exact(replace(problem, pins=Pins(cuts=("layer1",))))


def test_a_solver_that_proved_nothing_leaves_a_gap_of_everything() -> None:
    """Once the plan could not be written: its gap was infinite."""
    problem = Problem(profile=chain(3), spec=platform(), training=TrainingSpec(global_batch=16))
    reported = report(exact(problem), problem, name="some solver", bound=-math.inf, solve_s=1.0)
    assert reported.solver
    assert (reported.solver.bound, reported.solver.gap) == (0.0, 1.0)
    assert reported.solver.status is Optimality.FEASIBLE
    assert from_text(Plan, to_text(reported), source="plan.json") == reported


def test_what_is_known_of_a_part_of_a_space_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces come and go during a search, and a new one may lie where an old one lay: as here, all of them do."""
    monkeypatch.setattr("funcpipe.partitioner.search.search.id", lambda _: 0, raising=False)
    shared = platform(2, shared_bytes_s=5e7)
    for seed in range(4):
        training = TrainingSpec(global_batch=16, time_value=30.0)
        problem = Problem(profile=chain(3, 2, seed), spec=shared, training=training)
        expected, found = exhaustive(problem).solver, exact(problem).solver
        assert expected
        assert found
        assert found.objective == pytest.approx(expected.objective, rel=1e-8)
