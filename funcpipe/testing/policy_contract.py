"""What every policy must do, as a suite for pytest: on problems so small that all of their plans can be priced.

A test module of a policy gives the fixture `policy`, a function from a problem to a plan, and inherits the suite.
"""

from collections.abc import Iterator
from functools import cache

from funcpipe.core import (
    MB,
    FunctionSize,
    LayerProfile,
    ModelProfile,
    PlatformSpec,
    TensorProfile,
    TrainingSpec,
)
from funcpipe.errors import Infeasible
from funcpipe.partitioner import Policy
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exhaustive import exhaustive

_SIZES = (1024, 2048)


class PolicyContract:
    """Inherit this; every method takes the fixture `policy`."""

    def test_its_plans_fit_and_are_priced_as_all_plans_are(self, policy: Policy) -> None:
        """By the one cost model; a policy that has no plan says so."""
        planned = 0
        for problem in problems():
            try:
                plan = policy(problem)
            except Infeasible:
                continue
            planned += 1
            assert plan.estimate == evaluate(plan, problem.profile, problem.spec)
            for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
                assert not estimate.lacks_bytes(stage.memory_mb)
            assert [stage.first for stage in plan.stages[1:]] == [stage.stop for stage in plan.stages[:-1]]
            assert (plan.stages[0].first, plan.stages[-1].stop) == (0, len(problem.profile.layers))
        assert planned, "it has no plan for any problem"

    def test_no_plan_is_better_than_the_best(self, policy: Policy) -> None:
        """What is, was priced for something else than was asked."""
        for problem, best in zip(problems(), _best_objectives(), strict=True):
            try:
                plan = policy(problem)
            except Infeasible:
                continue
            assert problem.goal.of_plan(plan) >= best * (1 - 1e-9)


@cache
def _best_objectives() -> tuple[float, ...]:
    """Of all plans of each of `problems`."""
    return tuple(problem.goal.of_plan(exhaustive(problem)) for problem in problems())


def problems() -> Iterator[Problem]:
    """Chains of three layers on two sizes, for two goals; one of them does not fit into a single function."""
    for parameter_mb in (20, 250):
        for time_value in (0.0, 3.84):
            training = TrainingSpec(global_batch=8, time_value=time_value)
            yield Problem(profile=_profile(parameter_mb), spec=_platform(), training=training)


def _profile(parameter_mb: int) -> ModelProfile:
    seconds = ((0.2, 0.11), (0.4, 0.21), (0.3, 0.16))
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            parameter_bytes=parameter_mb * MB,
            activation_bytes=(10 + 5 * i) * MB,
            forward_s=each,
            backward_s=tuple(2 * s for s in each),
        )
        for i, each in enumerate(seconds)
    )
    tensors = tuple(
        TensorProfile(
            name=f"tensor{i}", producer=i, consumers=(i + 1,), forward_bytes=(2 + i) * MB, backward_bytes=(2 + i) * MB
        )
        for i in range(len(layers) - 1)
    )
    return ModelProfile(
        model="chain",
        micro_batch=4,
        platform="contract",
        sizes=tuple(f"{mb}MB" for mb in _SIZES),
        base_memory_bytes=200 * MB,
        layers=layers,
        tensors=tensors,
    )


def _platform() -> PlatformSpec:
    return PlatformSpec(
        name="contract",
        region="nowhere",
        as_of="2026-11",
        source="made up",
        sizes=tuple(
            FunctionSize(
                name=f"{mb}MB",
                memory_mb=mb,
                vcpu=mb / 2048,
                upload_bytes_s=4e7 * mb / 1024,
                download_bytes_s=4e7 * mb / 1024,
                price_usd_s=1.6e-8 * mb,
            )
            for mb in _SIZES
        ),
        latency_s=0.04,
        contention=1.0,
        shared_bytes_s=None,
        price_put_usd=5e-6,
        price_get_usd=4e-7,
        price_invocation_usd=2e-7,
        lifetime_s=900.0,
        cold_start_s=2.5,
        max_functions=100,
        max_payload_bytes=2**20,
    )
