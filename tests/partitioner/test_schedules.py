"""The schedule as part of the plan: what the cost model says of it beside the simulator, and when it is chosen."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcpipe.analysis.predict import predict
from funcpipe.core import ModelProfile, Plan, PlatformSpec, Recompute, ScheduleKind, Stage, Sync, TrainingSpec, Wire
from funcpipe.partitioner.alternatives import pareto_front, second_best
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from tests.partitioner.instances import MB, chain, platform

IN_TURN = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER_ONE_F_ONE_B)


def stage_for_each_layer(profile: ModelProfile, sizes: list[int], schedule: ScheduleKind, micro_batches: int) -> Plan:
    return Plan(
        global_batch=4 * micro_batches,
        micro_batch=4,
        replicas=1,
        schedule=schedule,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=tuple(
            Stage(first=i, stop=i + 1, size=f"{1024 * size}MB", memory_mb=1024 * size) for i, size in enumerate(sizes)
        ),
    )


def with_gradients(profile: ModelProfile, factor: float) -> ModelProfile:
    """The profile with `factor` times the bytes, at least one, as many back as forth."""
    sizes = [max(1, int(factor * tensor.forward_bytes)) for tensor in profile.tensors]
    tensors = [
        replace(t, forward_bytes=s, backward_bytes=s, saved_by=()) for t, s in zip(profile.tensors, sizes, strict=True)
    ]
    return replace(profile, tensors=tuple(tensors))


def both_s(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> tuple[float, float]:
    return evaluate(plan, profile, spec).iteration_s, predict(plan, profile, spec).duration_s


@pytest.mark.parametrize("schedule", IN_TURN)
@given(seed=st.integers(0, 10**6), micro_batches=st.integers(1, 12))
def test_a_stage_alone_and_a_micro_batch_alone_take_exactly_what_the_cost_model_says(
    schedule: ScheduleKind, seed: int, micro_batches: int
) -> None:
    for layers, count in ((1, micro_batches), (5, 1)):
        profile = with_gradients(chain(layers, 3, seed), 1.0)
        plan = stage_for_each_layer(profile, [1 + (seed + i) % 3 for i in range(layers)], schedule, count)
        said_s, simulated_s = both_s(plan, profile, platform())
        assert said_s == pytest.approx(simulated_s, rel=1e-9)


@pytest.mark.parametrize("schedule", IN_TURN)
@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_equal_stages_without_transfers_take_the_time_of_pipedream_flush(
    schedule: ScheduleKind, stages: int, micro_batches: int
) -> None:
    """(m + stages − 1)(F + B): Narayanan et al., ICML 2021, section 2."""
    profile = with_gradients(chain(stages, 3, 1), 0.0)
    profile = replace(profile, layers=tuple(replace(profile.layers[0], name=f"layer{i}") for i in range(stages)))
    plan = stage_for_each_layer(profile, [2] * stages, schedule, micro_batches)
    one_s = profile.layers[0].forward_s[1] + profile.layers[0].backward_s[1]
    for seconds in both_s(plan, profile, platform(latency_s=0.0)):
        assert seconds == pytest.approx((micro_batches + stages - 1) * one_s, rel=1e-5)


@pytest.mark.parametrize("schedule", IN_TURN)
@given(
    seed=st.integers(0, 10**6),
    layers=st.integers(2, 6),
    micro_batches=st.integers(2, 16),
    factor=st.sampled_from([0.1, 1.0, 5.0]),
    latency_s=st.sampled_from([0.0, 0.04, 0.3]),
)
@example(seed=146367, layers=3, micro_batches=16, factor=5.0, latency_s=0.0)  # the worst that was found for 1F1B
def test_unequal_stages_take_about_what_the_cost_model_says(
    schedule: ScheduleKind, seed: int, layers: int, micro_batches: int, factor: float, latency_s: float
) -> None:
    """Of 2400 random chains the worst were 0.82 and 1.25 times the simulated time; plans that were chosen are even.

    Hypothesis, which looks for the worst, once found 0.746.
    """
    profile = with_gradients(chain(layers, 3, seed), factor)
    plan = stage_for_each_layer(profile, [1 + seed // 3**i % 3 for i in range(layers)], schedule, micro_batches)
    said_s, simulated_s = both_s(plan, profile, platform(latency_s=latency_s))
    assert 0.7 <= said_s / simulated_s <= 1.4


def test_where_memory_is_scarce_fewer_activations_make_a_cheaper_plan() -> None:
    profile, spec = chain(4, 3, 3), platform()
    heavy = replace(profile, layers=tuple(replace(x, activation_bytes=150 * MB) for x in profile.layers))
    training = TrainingSpec(global_batch=16, replicas=(1,), recompute=Recompute.NEVER)
    costs = {}
    for schedule in (None, *ScheduleKind):
        plan = optimize(heavy, spec, replace(training, schedule=schedule))
        assert plan.estimate is not None
        assert schedule in (None, plan.schedule)
        costs[schedule] = plan.estimate.cost_usd
    assert costs[None] == min(costs.values())
    assert costs[ScheduleKind.ONE_F_ONE_B] < 0.9 * costs[ScheduleKind.GPIPE]


def test_of_schedules_that_do_equally_well_the_plainest_is_taken() -> None:
    training = TrainingSpec(global_batch=16, replicas=(1,), recompute=Recompute.NEVER)
    light = replace(chain(4, 3, 3), layers=tuple(replace(x, activation_bytes=0) for x in chain(4, 3, 3).layers))
    problem = Problem(profile=light, spec=platform(), training=training)
    plan = exact(problem)
    assert len(plan.stages) == 1  # for a single stage all schedules take the same time
    assert plan.schedule is ScheduleKind.GPIPE
    front = pareto_front(light, platform(), training)
    assert front.plans[-1].schedule is ScheduleKind.GPIPE


def test_the_second_best_plan_is_more_than_another_schedule() -> None:
    profile, spec = chain(5, 3, 2), platform()
    training = TrainingSpec(global_batch=16, time_value=30.0)
    problem = Problem(profile=profile, spec=spec, training=training)
    plan = exact(problem)
    other = second_best(problem, plan)
    assert other is not None
    assert (other.stages, other.replicas, other.sync) != (plan.stages, plan.replicas, plan.sync)
    explained = explain(plan, profile, spec, training)
    assert explained.second is not None
    assert explained.second.what.endswith(f"{other.schedule.value}, synchronisation {other.synchronisation}")
