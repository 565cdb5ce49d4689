"""Predictions that play one replica for all that do the same, against those that play every replica."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.analysis.predict import forecast, step_shape, task_cost
from funcpipe.core import (
    SYNC_WIRES,
    LayerProfile,
    ModelProfile,
    Plan,
    PlatformSpec,
    ScheduleKind,
    Stage,
    Streams,
    Sync,
    TensorProfile,
    Wire,
    worker_name,
)
from funcpipe.core.texts import spread_prefix
from funcpipe.errors import InvalidValue
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Timeline, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.request_queues import RequestLimits
from funcpipe.scheduler.simulator.simulate import play
from funcpipe.scheduler.tasks import Task, source_of

LAMBDA = load_spec("aws-lambda")
SIZES = tuple(size.name for size in LAMBDA.sizes)
LIMITS = st.fixed_dictionaries(
    {
        "puts_s": st.sampled_from([None, 20.0, 150.0, 3500.0]),
        "gets_s": st.sampled_from([None, 30.0, 400.0, 5500.0]),
        "requests_s": st.sampled_from([None, 60.0, 4000.0]),
    }
)
SHARED = st.fixed_dictionaries(
    {
        "shared_bytes_s": st.sampled_from([None, 3e8, 1e9]),
        "shared_cores": st.sampled_from([None, 6]),
        "contention": st.sampled_from([1.0, 1.4]),
    }
)


def profile(stages: int, megabytes: int) -> ModelProfile:
    layers = tuple(
        LayerProfile(
            name=f"l{i}",
            parameter_bytes=(i + 1) * megabytes * 10**6,
            activation_bytes=1000,
            forward_s=(0.2 + 0.1 * i,) * len(SIZES),
            backward_s=(0.4,) * len(SIZES),
        )
        for i in range(stages)
    )
    tensors = tuple(
        TensorProfile(name=f"l{i}", producer=i, consumers=(i + 1,), forward_bytes=10**6, backward_bytes=2 * 10**6)
        for i in range(stages - 1)
    )
    return ModelProfile(
        model="m",
        micro_batch=2,
        platform="aws-lambda",
        sizes=SIZES,
        base_memory_bytes=0,
        layers=layers,
        tensors=tensors,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size, replicas = LAMBDA.sizes[-1], draw(st.integers(2, 6) | st.integers(15, 20))
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields = {"sync_every": 8, "sync_fragments": draw(st.integers(1, 3)), "sync_delay": draw(st.integers(0, 2))}
    fields |= {
        "global_batch": 2 * replicas * draw(st.integers(1, 3)),
        "micro_batch": 2,
        "replicas": replicas,
        "schedule": draw(st.sampled_from(ScheduleKind)),
        "sync": draw(st.sampled_from(Sync)),
        "wire": draw(st.sampled_from([Wire.FP32, Wire.BF16])),
        "wire_sync": draw(st.sampled_from(SYNC_WIRES)),
        "stages": tuple(
            Stage(first=i, stop=i + 1, size=size.name, memory_mb=size.memory_mb) for i in range(draw(st.integers(1, 3)))
        ),
    }
    plan = Plan(**fields)
    try:
        return replace(plan, streams=Streams(draw(st.integers(1, 4)), draw(st.integers(1, 3)), 1))
    except InvalidValue:
        return plan  # whose way of summing is not cut


def all_played(plan: Plan, model: ModelProfile, spec: PlatformSpec, shape: StepShape, *, meets: bool) -> Timeline:
    """Every task of every replica, and a queue for each of its requests."""
    graph = build_graph(shape)
    costs = costs_of(graph, task_cost(plan, model, spec, meets=meets), uniform=True)
    shared = Disturbances(
        contention=spec.contention, shared_bytes_s=(spec.shared_bytes_s,), shared_cores=spec.shared_cores
    )
    return play(graph, costs, disturbances=shared, limits=queues(graph, spec))


def queues(graph: Graph, spec: PlatformSpec) -> RequestLimits:
    found: dict[object, int] = {}
    interval_s: list[float] = []

    def queue(rate: float | None, key: object) -> int:
        if rate is not None and key not in found:
            found[key] = len(found)
            interval_s.append(1 / rate)
        return -1 if rate is None else found[key]

    def of(task: Task) -> tuple[int, int]:
        if not (task.kind.is_put or task.kind.is_get):
            return -1, -1
        put = source_of(task) if task.kind.is_get else task
        key = task.kind.is_put, spread_prefix(worker_name(put.stage, put.replica))
        return queue(spec.puts_s if task.kind.is_put else spec.gets_s, key), queue(spec.requests_s, "all")

    return RequestLimits(queues=tuple(zip(*map(of, graph.tasks), strict=True)), interval_s=interval_s)


@given(plans(), st.integers(1, 60), LIMITS, SHARED, st.booleans(), st.integers(0, 2))
def test_a_forecast_has_the_events_of_all_replicas_each_played(
    plan: Plan,
    megabytes: int,
    limits: Mapping[str, float | None],
    shared: Mapping[str, float | None],
    meets: bool,
    fragment: int,
) -> None:
    model, spec = profile(len(plan.stages), megabytes), replace(LAMBDA, **limits, **shared)  # type: ignore[arg-type]
    fragment = fragment % plan.sync_fragments
    found = forecast(plan, model, spec, meets=meets, fragment=fragment)
    shape = step_shape(plan, model, spec, meets=meets, fragment=fragment)
    expected = all_played(plan, model, spec, shape, meets=meets)
    assert found.duration_s == expected.duration_s
    assert found.trace(run="r") == expected.trace(run="r")


@pytest.mark.parametrize(("gets_s", "made"), [(None, 1), (10_000.0, 1), (200.0, 48)])
def test_replicas_are_played_once_as_long_as_no_request_waits(gets_s: float | None, made: int) -> None:
    plan = Plan(
        global_batch=96,
        micro_batch=2,
        replicas=48,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=tuple(Stage(first=i, stop=i + 1, size=SIZES[-1], memory_mb=10240) for i in range(2)),
    )
    spec = replace(LAMBDA.without_request_limits(), gets_s=gets_s)
    played = forecast(plan, profile(2, 30), spec)
    assert len(played.starts_s) * 48 == made * len(played.tasks)
    assert len(played.trace(run="r").events) == len(played.tasks)
