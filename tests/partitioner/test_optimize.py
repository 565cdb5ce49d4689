"""The one entry: policies and solvers by name, clear errors, nothing heavy imported."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import (
    FunctionSize,
    ModelProfile,
    Optimality,
    Plan,
    PlatformSpec,
    Sync,
    TrainingSpec,
    from_text,
    read,
    to_text,
)
from funcpipe.errors import FormatError, Infeasible, InvalidValue, PlanError
from funcpipe.partitioner.optimize import optimize
from tests.partitioner.instances import chain, platform

TRAINING = TrainingSpec(global_batch=16, replicas=(1, 2), time_value=20.0, deadline_s=9.0)


def test_every_solver_finds_the_same_plan() -> None:
    profile, spec = chain(4, 2, 3), platform(2)
    training = TrainingSpec(global_batch=16, replicas=(1, 2), time_value=20.0)
    plans = [optimize(profile, spec, training, solver=solver) for solver in ("auto", "exact", "highs")]
    plans.append(optimize(profile, spec, training, policy="exhaustive"))
    objectives = [plan.solver.objective for plan in plans if plan.solver]
    assert objectives == pytest.approx([objectives[0]] * 4)


def test_a_plan_is_optimal_over_all_ways_of_synchronising() -> None:
    """Solvers search with two ways, the same for all stages, and call no plan optimal that is better in another."""
    training = TrainingSpec(global_batch=16, time_value=20.0, replicas=(4,))
    for seed in range(4):
        profile, spec = chain(4, 2, seed), platform(2)
        plan = optimize(profile, spec, training)
        assert plan.solver
        assert (plan.solver.status, plan.solver.sync_ways) == (Optimality.OPTIMAL, None)
        assert plan.solver.bound is not None
        assert plan.solver.bound <= plan.solver.objective
        reached = {optimize(profile, spec, replace(training, sync=sync)).solver.objective for sync in Sync}  # type: ignore[union-attr]
        assert plan.solver.objective <= min(reached) * (1 + 1e-9)
        by_highs = optimize(profile, spec, training, solver="highs").solver
        assert by_highs
        assert by_highs.sync_ways == 2
        assert by_highs.objective >= plan.solver.bound
        assert (by_highs.status is Optimality.OPTIMAL) == (by_highs.bound is not None)


def test_a_model_whose_micro_batches_must_follow_each_other_has_one_replica() -> None:
    profile = replace(chain(4, 2, 3), carried=("gate.calls",))
    assert from_text(ModelProfile, to_text(profile), source="profile.json") == profile
    older = json.loads(to_text(profile))
    del older["carried"]
    assert from_text(ModelProfile, json.dumps(older), source="profile.json").carried == ()
    for policy in ("funcpipe", "uniform"):
        plan = optimize(profile, platform(2), TrainingSpec(global_batch=16, time_value=1e6), policy=policy)
        assert plan.replicas == 1
    with pytest.raises(PlanError, match=r"one replica only: each forward leaves gate\.calls .*admit replicas=\(1,\)"):
        optimize(profile, platform(2), TrainingSpec(global_batch=16, replicas=(2, 4)))


def test_a_plan_survives_its_json() -> None:
    plan = optimize(chain(4), platform(), TrainingSpec(global_batch=16, deadline_s=1e6))
    assert from_text(Plan, to_text(plan), source="plan.json") == plan


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidValue, match="policy must be one of funcpipe, "):
        optimize(chain(2), platform(), TrainingSpec(global_batch=4), policy="luck")
    with pytest.raises(InvalidValue, match="solver must be one of auto, exact"):
        optimize(chain(2), platform(), TrainingSpec(global_batch=4), solver="luck")


def test_sizes_that_were_not_measured_are_refused() -> None:
    with pytest.raises(PlanError, match="was not measured on '3072MB'"):
        optimize(chain(2, 2), platform(3), TrainingSpec(global_batch=4))


def test_a_deadline_that_nothing_meets() -> None:
    with pytest.raises(Infeasible):
        optimize(chain(2), platform(), TrainingSpec(global_batch=4, deadline_s=1e-6))


def test_the_search_loads_neither_torch_nor_a_solver() -> None:
    code = (
        "import sys, funcpipe.partitioner.search.exact, funcpipe.partitioner.optimize;"
        "print([name for name in ('torch', 'pyomo', 'highspy', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"latency_s": 0.04', '"latency_s": NaN'), "field 'latency_s' must be a finite number, got NaN"),
        (('"contention": 1.0', '"contention": 0.5'), "field 'contention' must be at least 1, got 0.5"),
        (('"memory_mb": 2048', '"memory_mb": 512'), "field 'sizes' must be in ascending order of memory_mb"),
        (('"name": "2048MB"', '"name": "1024MB"'), "field 'sizes' must not hold the same name twice"),
        (('"vcpu": 0.5', '"vcpu": -1'), r"field 'sizes\[0\].vcpu' must be above 0, got -1.0"),
    ],
)
def test_bad_platforms_are_refused_with_field_and_value(change: tuple[str, str], message: str) -> None:
    text = to_text(platform(2))
    assert change[0] in text
    with pytest.raises(FormatError, match=f"spec.json: {message}"):
        from_text(PlatformSpec, text.replace(*change, 1), source="spec.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"producer": 0', '"producer": 1'), r"field 'tensors\[0\].consumers\[0\]' must come after the producer 1"),
        (('"parameter_bytes": ', '"parameter_bytes": -'), r"field 'layers\[0\].parameter_bytes' must be at least 0"),
        (('"sizes": [', '"sizes": ["0MB", '), r"field 'layers\[0\].forward_s' must hold one value for each of the 2"),
        (('"layers": [', '"layers": [], "old": ['), "field 'layers' must not be empty"),
    ],
)
@pytest.mark.filterwarnings("ignore:profile.json. unknown field")
def test_bad_profiles_are_refused_with_field_and_value(change: tuple[str, str], message: str) -> None:
    text = to_text(chain(3, 1))
    assert change[0] in text
    with pytest.raises(FormatError, match=f"profile.json: {message}"):
        from_text(ModelProfile, text.replace(*change, 1), source="profile.json")


def numbers(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all numbers of a document."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield (*path, key)
        yield from numbers(item, (*path, key))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1])
@pytest.mark.parametrize("value", [platform(1, shared_bytes_s=1e9, shared_cores=2), chain(3, 1, 3, skips=2), TRAINING])
def test_no_number_may_be_negative_or_endless(value: PlatformSpec | ModelProfile | TrainingSpec, wrong: float) -> None:
    text = to_text(value)
    for path in numbers(json.loads(text)):
        data = json.loads(text)
        *place, last = path
        holder = functools.reduce(lambda some, key: some[key], place, data)
        holder[last] = wrong
        with pytest.raises(FormatError) as caught:
            from_text(type(value), json.dumps(data), source="x.json")
        name = next(str(key) for key in reversed(path) if isinstance(key, str))
        assert name in str(caught.value), path
        assert str(json.dumps(wrong)) in str(caught.value), path


@pytest.mark.parametrize("saved_by", [(2, 1), (1, 1), (0, 9), (-1,)])
def test_unknown_keepers_of_a_tensor_are_refused(saved_by: tuple[int, ...]) -> None:
    profile = chain(3, 1)
    with pytest.raises(InvalidValue, match="saved_by"):
        replace(profile, tensors=(replace(profile.tensors[0], saved_by=saved_by), profile.tensors[1]))


def test_an_unknown_consumer_is_refused() -> None:
    text = to_text(chain(3, 1)).replace(
        '"producer": 1,\n   "consumers": [\n    2', '"producer": 1,\n   "consumers": [\n    7'
    )
    with pytest.raises(FormatError, match=r"field 'tensors\[1\].consumers' must name one of the 3 layers, got 7"):
        from_text(ModelProfile, text, source="profile.json")


def test_the_lambda_specification_can_be_read() -> None:
    spec = read(PlatformSpec, "funcpipe/platforms/specs/aws-lambda.json")
    assert [size.memory_mb for size in spec.sizes] == [1024, 2048, 3072, 4096, 5120, 6144, 8192, 10240]
    largest: FunctionSize = spec.sizes[-1]
    assert largest.price_usd_s == pytest.approx(1.66667e-4)
    assert largest.upload_bytes_s == 7e7
    assert spec.sizes[0].upload_bytes_s == pytest.approx(7e7 * 1024 / 1769, rel=1e-6)
