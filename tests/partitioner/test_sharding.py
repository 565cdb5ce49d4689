"""Plans with an optimiser divided over replicas: smaller functions, and nothing that cannot be run."""

from dataclasses import replace

import pytest

from funcpipe.core import MB, Recompute, Sync, TiedParameter, Wire
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.baselines import hybridps
from funcpipe.partitioner.cost.evaluate import plan_loads
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from tests.partitioner.instances import chain, platform
from tests.partitioner.oracles import optima
from tests.partitioner.problems import ADAM, PROFILE, SPEC, tied

SHARDED = replace(ADAM, shard_optimizer=True)


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
    """A base at which the hungriest layer leaves no room for Adam's whole state."""
    small = replace(PROFILE, base_memory_bytes=2200 * 2**20)
    training = replace(SHARDED, replicas=(4,), sync=Sync.PIPELINED, recompute=Recompute.NEVER)
    found = optimize(small, SPEC, training)
    assert found.estimate is not None
    assert all(s.memory_bytes <= t.memory_mb * 2**20 for s, t in zip(found.estimate.stages, found.stages, strict=True))
    with pytest.raises(Infeasible, match="use plain SGD"):
        optimize(small, SPEC, replace(training, shard_optimizer=False))


def test_stages_that_share_parameters_are_no_choice() -> None:
    for sharded in (True, False):
        problem = tied(sharded)
        found = exact(problem)
        assert found.solver
        assert found.solver.objective == pytest.approx(optima(f"tied, divided {sharded}").objective, rel=1e-9)
        assert bool(plan_loads(found, problem.profile, SPEC).ties.upload_objects.any()) == (not sharded)


def test_replicas_that_train_alone_divide_what_they_keep_of_shared_parameters_too() -> None:
    """Their optimisers are whole, so stages that share parameters are a choice, and the best one here."""
    tie = TiedParameter(name="tied", layers=(0, 2), parameter_bytes=MB)
    profile = replace(chain(3, 1, 7), ties=(tie,))
    training = replace(SHARDED, replicas=(2,), time_value=3000.0, sync=Sync.PIPELINED, sync_every=4, global_batch=16)
    problem = Problem(profile=profile, spec=platform(1, shared_bytes_s=None), training=training)
    found, expected = exact(problem).solver, exhaustive(problem).solver
    assert found is not None
    assert expected is not None
    assert found.objective == pytest.approx(expected.objective, rel=1e-9)
    assert plan_loads(exact(problem), profile, problem.spec).ties.upload_objects.any()


def test_shared_parameters_that_cannot_stay_together_are_named() -> None:
    """Either half of the layers fits a function, all of them do not."""
    tie = TiedParameter(name="tied", layers=(0, 4), parameter_bytes=PROFILE.layers[0].parameter_bytes // 2)
    small = replace(PROFILE, ties=(tie,), base_memory_bytes=1600 * 2**20)
    training = replace(SHARDED, replicas=(2,))
    assert optimize(small, SPEC, replace(training, shard_optimizer=False)).replicas == 2
    with pytest.raises(Infeasible, match="no plan keeps all layers that share parameters in one stage"):
        optimize(small, SPEC, training)


def test_an_explanation_shows_the_share() -> None:
    found = optimize(PROFILE, SPEC, replace(SHARDED, replicas=(4,)))
    explained = explain(found, PROFILE, SPEC, replace(SHARDED, replicas=(4,)))
    for stage, one in zip(found.stages, explained.stages, strict=True):
        assert one.optimizer_bytes == pytest.approx(PROFILE.parameter_bytes(stage.first, stage.stop) * 2 / 4, abs=1)
    assert "optimiser divided over the replicas" in render(explained)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidValue, match="with shard_optimizer"):
        replace(SHARDED, sync=Sync.ALL_REDUCE)
    with pytest.raises(InvalidValue, match="must be fp32, bf16 or int8 with shard_optimizer"):
        replace(SHARDED, wire_back=Wire.FP16)
    with pytest.raises(InvalidValue, match="does not go with the policy hybridps"):
        hybridps(Problem(profile=PROFILE, spec=SPEC, training=SHARDED))
