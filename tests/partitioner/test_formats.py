"""Sums in 16 bits: what they cost, and when the planner chooses them by itself."""

from dataclasses import replace

import pytest

from funcpipe.core import Numerics, Plan, Precision, Sync, Wire
from funcpipe.partitioner.alternatives import pareto_front
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.goal import REASON, REASON_16_BITS, reason_for, with_formats
from tests.partitioner.instances import platform
from tests.partitioner.oracles import SYNCS, of_sync, optima
from tests.partitioner.problems import ADAM as EXACT
from tests.partitioner.problems import PROFILE, SPEC, in_16_bits

FREE = replace(EXACT, numerics=Numerics.BF16)


def objective(plan: Plan) -> float:
    assert plan.solver is not None
    return plan.solver.objective


@pytest.mark.parametrize(("sync", "sharded"), SYNCS)
def test_the_best_plan_in_16_bits_is_that_of_enumeration_and_costs_no_more(sync: Sync | None, sharded: bool) -> None:
    training = in_16_bits(sync, sharded).training
    found = optimize(PROFILE, SPEC, training)
    plain = optimize(PROFILE, SPEC, replace(training, wire_sync=Wire.FP32))
    assert found.wire_sync is Wire.BF16
    assert objective(found) <= optima(of_sync(sync, sharded)).objective * (1 + 1e-9)
    assert objective(found) <= objective(plain) * (1 + 1e-9)


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("sharded", [False, True])
def test_memory_is_planned_as_for_sums_in_32_bits(replicas: int, sharded: bool) -> None:
    """Buffers are smaller, but functions were measured to need nearly as much at their peak."""
    training = replace(EXACT, shard_optimizer=sharded, replicas=(replicas,), sync=Sync.PIPELINED)
    plan = optimize(PROFILE, SPEC, training)
    half = evaluate(replace(plan, wire_sync=Wire.BF16), PROFILE, SPEC)
    assert plan.estimate is not None
    assert [stage.memory_bytes for stage in half.stages] == [stage.memory_bytes for stage in plan.estimate.stages]
    assert half.iteration_s < plan.estimate.iteration_s


def test_what_may_travel_in_16_bits_does_and_the_plan_says_why() -> None:
    found = optimize(PROFILE, SPEC, replace(FREE, replicas=(4,), time_value=3000.0))
    assert (found.wire, found.gradient_wire, found.wire_sync) == (Wire.BF16,) * 3
    assert found.made_for == replace(FREE, replicas=(4,), time_value=3000.0)
    assert reason_for(found) == REASON
    assert f"sums in bf16\nnumber formats: {REASON}" in render(explain(found, PROFILE, SPEC, found.made_for))
    asked = replace(FREE, replicas=(4,), numerics=Numerics.EXACT, wire=Wire.BF16, wire_sync=Wire.BF16)
    assert objective(found) == pytest.approx(objective(optimize(PROFILE, SPEC, replace(asked, time_value=3000.0))))


@pytest.mark.parametrize("time_value", [0.0, 3.84, 245.76])
def test_freedom_never_costs(time_value: float) -> None:
    exact, free = (optimize(PROFILE, SPEC, replace(kind, time_value=time_value)) for kind in (EXACT, FREE))
    assert objective(free) <= objective(exact) * (1 + 1e-9)


def test_what_is_asked_for_in_16_bits_stays_as_it_is_asked_for() -> None:
    chosen = with_formats(replace(FREE, wire=Wire.FP16, wire_back=Wire.FP32))
    assert (chosen.wire, chosen.wire_back, chosen.wire_sync) == (Wire.FP16, Wire.BF16, Wire.BF16)
    assert with_formats(EXACT) is EXACT


def test_what_never_travels_stays_exact() -> None:
    alone = optimize(PROFILE, SPEC, replace(FREE, replicas=(1,), time_value=0.0))
    assert alone.wire_sync is Wire.FP32
    assert (alone.wire is Wire.BF16) == (len(alone.stages) > 1)
    whole = optimize(replace(PROFILE, base_memory_bytes=0), platform(1, shared_bytes_s=None), replace(FREE, sync=None))
    assert (whole.wire is Wire.BF16) == (len(whole.stages) > 1)


def test_a_front_is_of_the_formats_that_are_best() -> None:
    front = pareto_front(PROFILE, SPEC, replace(FREE, replicas=(1, 4)))
    for plan in front.plans:
        assert plan.wire is (Wire.BF16 if len(plan.stages) > 1 else Wire.FP32)
        assert plan.wire_sync is (Wire.BF16 if plan.replicas > 1 else Wire.FP32)


@pytest.mark.parametrize("time_value", [3.84, 245.76])
def test_with_int8_allowed_the_best_of_the_formats_of_messages_and_sums_are_taken(time_value: float) -> None:
    exact = replace(EXACT, time_value=time_value, replicas=(4,))
    found = optimize(PROFILE, SPEC, replace(exact, numerics=Numerics.INT8))
    forced = [
        optimize(PROFILE, SPEC, replace(exact, wire=wire, wire_sync=wire_sync))
        for wire in (Wire.INT8, Wire.BF16)
        for wire_sync in (Wire.BF16, Wire.INT8)
    ]
    best = min(forced, key=objective)
    assert objective(found) == pytest.approx(objective(best), rel=1e-9)
    assert (found.wire, found.wire_sync) == (best.wire, best.wire_sync)
    assert found.made_for == replace(exact, numerics=Numerics.INT8)


def test_messages_travel_in_8_bits_where_they_would_in_32_and_are_not_16_already() -> None:
    free = replace(EXACT, numerics=Numerics.INT8)
    chosen = with_formats(replace(free, wire_back=Wire.FP32))
    assert (chosen.wire, chosen.wire_back, chosen.wire_sync) == (Wire.INT8, Wire.INT8, Wire.BF16)
    assert with_formats(replace(free, wire=Wire.BF16)).wire is Wire.BF16
    scaled = with_formats(replace(free, wire_back=Wire.FP16))
    assert (scaled.wire, scaled.wire_back) == (Wire.INT8, Wire.FP16)
    for precision in (Precision.BF16, Precision.FP16):
        assert with_formats(free, precision).wire is Wire.BF16


def test_a_plan_says_what_travels_in_8_bits() -> None:
    asked = replace(EXACT, numerics=Numerics.INT8)
    plan = optimize(PROFILE, SPEC, replace(EXACT, replicas=(4,)))
    said = {
        (Wire.INT8, None, Wire.INT8): "activations, their gradients and sums",
        (Wire.INT8, None, Wire.BF16): "activations and their gradients",
        (Wire.INT8, Wire.BF16, Wire.BF16): "activations",
        (Wire.BF16, None, Wire.INT8): "sums",
    }
    for (wire, wire_back, wire_sync), what in said.items():
        made = replace(plan, wire=wire, wire_back=wire_back, wire_sync=wire_sync, made_for=asked)
        assert reason_for(made) == f"numerics=int8 allows 8 bits, and the best plan sends {what} in them"
    assert reason_for(replace(plan, wire=Wire.BF16, made_for=asked)) == REASON_16_BITS
    assert reason_for(replace(plan, made_for=asked)) is None
    given = replace(asked, wire=Wire.INT8)
    assert reason_for(replace(plan, wire=Wire.INT8, wire_sync=Wire.BF16, made_for=given)) == REASON_16_BITS


def test_sums_in_8_bits_are_planned_with_memory_for_what_is_kept() -> None:
    training = replace(EXACT, replicas=(4,), sync=Sync.PIPELINED, wire_sync=Wire.INT8)
    plan = replace(optimize(PROFILE, SPEC, training), wire_sync=Wire.INT8)
    small, large = (evaluate(replace(plan, wire_sync=wire), PROFILE, SPEC) for wire in (Wire.BF16, Wire.INT8))
    for one, other, stage in zip(small.stages, large.stages, plan.stages, strict=True):
        kept = 1.25 * PROFILE.parameter_bytes(stage.first, stage.stop)
        assert other.memory_bytes - one.memory_bytes == pytest.approx(kept)
