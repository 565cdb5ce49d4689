"""Loading in the cost model: seconds on a lane of its own, memory in the stages that load; in every search alike."""

from dataclasses import replace

import pytest

from funcpipe.analysis.predict import predict
from funcpipe.core import Recompute, ScheduleKind, Sync, TrainingSpec
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.search.exact import exact
from tests.partitioner.instances import MB, chain, draw_problem, platform
from tests.partitioner.oracles import compare, optima, with_loading
from tests.partitioner.problems import DATA, with_data


def test_data_takes_memory_in_the_first_and_the_last_stage_and_nowhere_else() -> None:
    problem = with_data(draw_problem(1), DATA)
    plan = exact(problem)
    layers = len(problem.profile.layers)
    names = [layer.name for layer in problem.profile.layers]
    stage = plan.stages[0]
    cuts = ((0, 1), (1, layers - 1), (layers - 1, layers))
    three = replace(
        plan,
        schedule=ScheduleKind.ONE_F_ONE_B,
        stages=tuple(replace(stage, first=a, stop=b, recompute=False, layers=tuple(names[a:b])) for a, b in cuts),
    )
    without = evaluate(three, replace(problem.profile, data=None), problem.spec)
    found = evaluate(three, problem.profile, problem.spec)
    each = three.micro_batches // three.replicas
    first, last = min(each, min(each, 3) + 1) + 2, min(each, 1 + 1) + 2
    assert [stage.data_bytes for stage in found.stages] == [(103 + 2 * first) * MB, 0, (103 + last) * MB]
    for one, other in zip(found.stages, without.stages, strict=True):
        assert one.memory_bytes == other.memory_bytes + one.data_bytes
    explained = explain(three, problem.profile, problem.spec, problem.training)
    assert [stage.data_bytes for stage in explained.stages] == [stage.data_bytes for stage in found.stages]
    assert f" + data {103 + 2 * first}" in render(explained)
    large = replace(DATA, resident_bytes=5000 * MB)
    too_large = evaluate(three, replace(problem.profile, data=large), problem.spec)
    with pytest.raises(PlanError, match=rf"stage 0 needs \d+ MB, {5003 + 2 * first} of them for data, its function"):
        check_memory(three, too_large)


def test_an_iteration_takes_at_least_as_long_as_loading_and_so_does_its_simulation() -> None:
    profile, spec = chain(4, micro_batch=4), platform(price_put_usd=0.0, latency_s=0.0)
    for load_s in (1e-6, 1e-3, 50.0):
        data = replace(DATA, load_s=load_s)
        layers = (replace(profile.layers[0], input_bytes=MB), *profile.layers[1:])
        loading = replace(profile, layers=layers, data=data)
        training = draw_problem(0).training
        training = replace(training, global_batch=32, replicas=(1,), deadline_s=None, budget_usd=None)
        plan = optimize(loading, spec, training)
        without = evaluate(plan, replace(loading, data=None), spec)
        found = evaluate(plan, loading, spec)
        assert found.iteration_s == max(without.iteration_s, 8 * load_s)
        assert found.stages[0].load_s == load_s
        predicted = predict(plan, loading, spec).duration_s
        plainly = predict(plan, replace(loading, data=None), spec).duration_s
        assert max(plainly, 8 * load_s) <= predicted <= max(plainly, 8 * load_s) * 1.1
        if load_s == 50.0:
            assert found.bottleneck == "stage 0 load"


@pytest.mark.parametrize("seed", range(8))
def test_exact_equals_exhaustive_with_data(seed: int) -> None:
    compare(draw_problem(seed), optima(f"loading {seed}"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 20))
def test_exact_equals_exhaustive_with_data_of_more_problems(seed: int) -> None:
    compare(draw_problem(seed), with_loading(draw_problem(seed)))


def test_the_papers_form_refuses_what_it_cannot_express_and_the_stage_form_agrees_with_the_search() -> None:
    profile = replace(chain(3, 2, 7), data=replace(DATA, load_s=2.0))
    training = TrainingSpec(
        global_batch=16,
        time_value=20.0,
        recompute=Recompute.NEVER,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
    )
    with pytest.raises(InvalidValue, match="cannot express what loading data takes; use another solver"):
        optimize(profile, platform(2), training, solver="paper")
    by_solver, expected = (optimize(profile, platform(2), training, solver=name).solver for name in ("highs", "exact"))
    assert by_solver is not None
    assert expected is not None
    assert by_solver.objective == pytest.approx(expected.objective, rel=1e-6)
