"""The other policies: what they choose by hand-made rules, and that none beats the optimum."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcpipe.core import Plan, Recompute, Sync, TrainingSpec
from funcpipe.errors import Infeasible
from funcpipe.partitioner import find_policy, policies
from funcpipe.partitioner.baselines import Server, bayes
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from tests.examples import at_most
from tests.partitioner.instances import MB, chain, platform

TRAINING = TrainingSpec(global_batch=32, time_value=60.0, recompute=Recompute.NEVER)
PIPELINES = ("tpdmp", "pipedream", "uniform")


def objective(plan: Plan) -> float:
    assert plan.solver
    return plan.solver.objective


@at_most(12)
@given(seed=st.integers(0, 1000), skips=st.integers(0, 2), policy=st.sampled_from(PIPELINES))
@example(seed=305, skips=0, policy="tpdmp")  # once it synchronised in a way that the search had not considered
def test_no_policy_beats_the_optimum(seed: int, skips: int, policy: str) -> None:
    profile, spec = chain(5, 3, seed, skips=skips), platform()
    training = replace(TRAINING, recompute=Recompute.AUTO)
    best, other = optimize(profile, spec, training), optimize(profile, spec, training, policy=policy)
    assert objective(best) <= objective(other) * (1 + 1e-9)
    assert other.solver
    assert other.solver.name == policy
    assert other.solver.gap is None  # a policy proves nothing


def test_there_are_no_more_policies_than_tested() -> None:
    data_parallel = {"lambdaml", "lambdaml-ga", "hybridps", "hybridps-ga"}
    assert set(policies()) == {"funcpipe", "exhaustive", "bayes", *PIPELINES, *data_parallel}
    assert callable(find_policy("uniform"))


def small(parameter_mb: int = 20, activation_mb: int = 100) -> Problem:
    """Three equal layers: 60 MB of parameters and 300 MB of activations for each micro-batch by default."""
    profile = chain(3, 2, 1)
    layers = tuple(
        replace(
            layer,
            parameter_bytes=parameter_mb * MB,
            activation_bytes=activation_mb * MB,
            constant_bytes=0,
            workspace_bytes=0,
            forward_s=(1.0, 0.5),
            backward_s=(2.0, 1.0),
        )
        for layer in profile.layers
    )
    tensors = tuple(replace(tensor, saved_by=()) for tensor in profile.tensors)
    return Problem(profile=replace(profile, layers=layers, tensors=tensors), spec=platform(2), training=TRAINING)


def test_lambdaml_takes_the_largest_function_and_the_fewest_workers_that_fit() -> None:
    problem = small()
    plan = optimize(problem.profile, problem.spec, problem.training, policy="lambdaml")
    # 8 micro-batches: 200 + 2 x 60 + 8 x 300 MB do not fit 2048 MB; two workers: 200 + 4 x 60 + 4 x 300 MB do
    assert (plan.replicas, len(plan.stages), plan.stages[0].memory_mb) == (2, 1, 2048)
    assert plan.sync is Sync.THREE_PHASE
    assert plan.estimate
    sync_s = 60 * MB / 4e7 + 60 * MB / 4.5e7 + 4 * 0.04
    assert plan.estimate.iteration_s == pytest.approx(4 * 4.5 + sync_s)


def test_accumulating_gradients_one_worker_suffices() -> None:
    problem = small()
    plan = optimize(problem.profile, problem.spec, problem.training, policy="lambdaml-ga")
    assert plan.replicas == 1
    assert plan.estimate
    assert plan.estimate.iteration_s == pytest.approx(8 * 4.5)
    assert plan.estimate.peak_memory_bytes == (200 + 2 * 60 + 1.125 * 300) * MB


def test_a_server_synchronises_and_is_paid() -> None:
    problem = small()
    plan = optimize(problem.profile, problem.spec, problem.training, policy="hybridps")
    server = Server()
    gradient_bytes = 60 * MB
    sync_s = gradient_bytes / 4e7 + gradient_bytes / 4.5e7 + 2 * 0.04
    assert plan.replicas == 2
    assert plan.estimate
    assert plan.estimate.stages[0].sync_s == pytest.approx(sync_s)
    assert plan.estimate.iteration_s == pytest.approx(4 * 4.5 + sync_s)
    assert plan.estimate.cost_usd == pytest.approx((2 * 3.2e-5 + server.price_usd_s) * plan.estimate.iteration_s)
    alone = optimize(problem.profile, problem.spec, problem.training, policy="hybridps-ga")
    assert alone.replicas == 1
    assert alone.estimate
    assert alone.estimate.stages[0].sync_s == 0


def test_data_parallelism_needs_functions_that_hold_the_model() -> None:
    problem = small(parameter_mb=400)
    for policy in ("lambdaml", "lambdaml-ga", "hybridps", "hybridps-ga"):
        with pytest.raises(Infeasible, match=f"the policy {policy} needs a function that holds the whole model"):
            optimize(problem.profile, problem.spec, problem.training, policy=policy)
    with pytest.raises(Infeasible, match="breaks a limit; it knows no other plan"):
        optimize(small().profile, problem.spec, replace(TRAINING, deadline_s=5.0), policy="lambdaml")


def test_pipedream_balances_equal_layers() -> None:
    problem = small()
    pinned = replace(problem.training, replicas=(1,), time_value=1e4)
    plan = optimize(problem.profile, problem.spec, pinned, policy="pipedream")
    assert [(stage.first, stage.stop) for stage in plan.stages] == [(0, 1), (1, 2), (2, 3)]


def test_bayesian_optimisation_finds_the_optimum_of_a_tiny_space() -> None:
    pytest.importorskip("optuna")
    problem = Problem(profile=chain(3, 2, 1), spec=platform(2), training=replace(TRAINING, replicas=(1, 2)))
    found = bayes(problem, trials=60, seed=1)
    best = optimize(problem.profile, problem.spec, problem.training)
    assert objective(best) <= objective(found) * (1 + 1e-9) <= objective(best) * 1.05
    assert objective(bayes(problem, trials=60, seed=1)) == objective(found)
