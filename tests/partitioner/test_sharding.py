"""Plans with an optimiser divided over replicas: smaller functions, and nothing that cannot be run."""

from dataclasses import replace

import pytest

from funcpipe.core import OptimizerKind, Sync, TiedParameter, TrainingSpec, Wire
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.baselines.data_parallel import hybridps
from funcpipe.partitioner.cost import plan_loads
from funcpipe.partitioner.exact import exact
from funcpipe.partitioner.exhaustive import exhaustive
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem import Problem
from tests.partitioner.instances import chain, platform

ADAM = TrainingSpec(global_batch=32, optimizer=OptimizerKind.ADAM, time_value=30.0)
SHARDED = replace(ADAM, shard_optimizer=True)
PROFILE, SPEC = chain(5, 3, 11), platform(3, shared_bytes_s=None)


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("sync", [None, Sync.PIPELINED, Sync.THREE_PHASE, Sync.STREAMED])
def test_a_plan_costs_no_more_and_synchronises_so_that_each_sums_its_own(replicas: int, sync: Sync | None) -> None:
    found = optimize(PROFILE, SPEC, replace(SHARDED, replicas=(replicas,), sync=sync))
    assert found.shard_optimizer
    assert found.sync.shares_sums
    if sync is not None:
        plain = optimize(PROFILE, SPEC, replace(ADAM, replicas=(replicas,), sync=sync))
        assert found.solver
        assert plain.solver
        assert found.solver.objective <= plain.solver.objective * (1 + 1e-9)


def test_a_stage_fits_a_smaller_function() -> None:
    """One function size, so small that only a share of Adam's state fits."""
    needs = optimize(PROFILE, SPEC, replace(SHARDED, replicas=(4,), sync=Sync.PIPELINED)).estimate
    whole = optimize(PROFILE, SPEC, replace(ADAM, replicas=(4,), sync=Sync.PIPELINED)).estimate
    assert needs is not None
    assert whole is not None
    assert needs.cost_usd < whole.cost_usd or needs.peak_memory_bytes < whole.peak_memory_bytes


def test_stages_that_share_parameters_are_no_choice() -> None:
    tie = TiedParameter(name="tied", layers=(0, 4), parameter_bytes=PROFILE.layers[0].parameter_bytes // 2)
    tied = replace(PROFILE, ties=(tie,))
    for training, apart in ((SHARDED, False), (ADAM, True)):
        problem = Problem(profile=tied, spec=SPEC, training=replace(training, replicas=(2,), time_value=3000.0))
        expected, found = exhaustive(problem), exact(problem)
        assert expected.solver
        assert found.solver
        assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-9)
        assert bool(plan_loads(found, tied, SPEC).ties.upload_objects.any()) == apart


def test_an_explanation_shows_the_share() -> None:
    found = optimize(PROFILE, SPEC, replace(SHARDED, replicas=(4,)))
    explained = explain(found, PROFILE, SPEC, replace(SHARDED, replicas=(4,)))
    for stage, one in zip(found.stages, explained.stages, strict=True):
        assert one.optimizer_bytes == pytest.approx(PROFILE.parameter_bytes(stage.first, stage.stop) * 2 / 4, abs=1)
    assert "optimiser divided over the replicas" in render(explained)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidValue, match="with shard_optimizer"):
        replace(SHARDED, sync=Sync.ALL_REDUCE)
    with pytest.raises(InvalidValue, match="must be fp32 or bf16 with shard_optimizer"):
        replace(SHARDED, wire_back=Wire.FP16)
    with pytest.raises(InvalidValue, match="does not go with the policy hybridps"):
        hybridps(Problem(profile=PROFILE, spec=SPEC, training=SHARDED))
