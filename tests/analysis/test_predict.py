"""The simulated plan against the closed form of the cost model, and against sums made by hand."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.analysis.predict import forecast, mean_step_s, predict
from funcpipe.core import (
    SYNC_WIRES,
    LayerProfile,
    ModelProfile,
    Plan,
    Resource,
    ScheduleKind,
    Stage,
    Streams,
    Sync,
    SyncWay,
    TensorProfile,
    TiedParameter,
    Wire,
)
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.cost.sync_choice import choose
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.simulator.costs import Timeline
from funcpipe.scheduler.tasks import Kind, Task
from tests.support.plans import chain_profile

SPEC = replace(load_spec("aws-lambda"), contention=1.0)
SIZES = tuple(size.name for size in SPEC.sizes)


@st.composite
def chains(draw: st.DrawFn) -> ModelProfile:
    count = draw(st.integers(1, 6))
    seconds = st.lists(st.floats(0, 5), min_size=len(SIZES), max_size=len(SIZES)).map(tuple)
    layers = tuple(
        LayerProfile(
            name=f"l{i}",
            parameter_bytes=draw(st.integers(0, 10**8)),
            activation_bytes=1000,
            forward_s=draw(seconds),
            backward_s=draw(seconds),
        )
        for i in range(count)
    )
    sizes = draw(st.lists(st.integers(1, 10**8), min_size=count - 1, max_size=count - 1))
    return chain_profile(layers, SPEC, sent_bytes=sizes, micro_batch=2)


def layer(name: str, parameter_bytes: int = 0, *, forward_s: float = 0.0, backward_s: float = 0.0) -> LayerProfile:
    """A layer that takes as long in functions of all sizes."""
    return LayerProfile(
        name=name,
        parameter_bytes=parameter_bytes,
        activation_bytes=0,
        forward_s=(forward_s,) * len(SIZES),
        backward_s=(backward_s,) * len(SIZES),
    )


def largest(stages: int, *, layers: int = 1) -> tuple[Stage, ...]:
    """Stages of so many layers each, in functions of the largest size."""
    size = SPEC.sizes[-1]
    return tuple(
        Stage(first=i * layers, stop=(i + 1) * layers, size=size.name, memory_mb=size.memory_mb) for i in range(stages)
    )


@st.composite
def plans(draw: st.DrawFn, profile: ModelProfile, replicas: int) -> Plan:
    layers = len(profile.layers)
    inner = draw(st.sets(st.integers(1, layers - 1))) if layers > 1 else set()
    cuts = [0, *sorted(inner), layers]
    stages = []
    for first, stop in itertools.pairwise(cuts):
        size = draw(st.sampled_from(SPEC.sizes))
        stages.append(Stage(first=first, stop=stop, size=size.name, memory_mb=size.memory_mb))
    return Plan(
        global_batch=2 * replicas * draw(st.integers(1, 6)),
        micro_batch=2,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=draw(st.sampled_from(Sync)),
        wire=draw(st.sampled_from([Wire.FP32, Wire.BF16])),
        wire_sync=draw(st.sampled_from(SYNC_WIRES)),
        stages=tuple(stages),
    )


@given(st.data())
def test_without_replicas_a_chain_takes_exactly_the_time_of_the_cost_model(data: st.DataObject) -> None:
    profile = data.draw(chains())
    plan = data.draw(plans(profile, 1))
    predicted = predict(plan, profile, SPEC)
    assert predicted.duration_s == pytest.approx(evaluate(plan, profile, SPEC).iteration_s, rel=1e-9, abs=1e-12)


@given(st.data())
def test_puts_gets_and_bytes_are_those_that_the_cost_model_bills(data: st.DataObject) -> None:
    profile = data.draw(chains())
    plan = data.draw(plans(profile, data.draw(st.integers(1, 4))))
    estimate, events = evaluate(plan, profile, SPEC), predict(plan, profile, SPEC).events
    assert sum(event.lane is Resource.UPLOAD for event in events) == estimate.puts
    assert sum(event.lane is Resource.DOWNLOAD for event in events) == estimate.gets


@pytest.mark.parametrize("backward_s", [(0.0, 1 / 3, 1.0, 1.0, 0.0), (0.1, 0.2, 0.3), (0.7, 0.1, 0.3)])
def test_no_part_of_a_backward_takes_less_than_no_time(backward_s: tuple[float, ...]) -> None:
    """All gradients are those of the first layer, which comes last: sums of the others' seconds may be rounded up."""
    layers = [layer(f"l{i}", int(i == 0), backward_s=seconds) for i, seconds in enumerate(backward_s)]
    profile = chain_profile(layers, SPEC, sent_bytes=())
    plan = Plan(
        global_batch=2,
        micro_batch=1,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.STREAMED,
        wire=Wire.FP32,
        stages=largest(1, layers=len(layers)),
    )
    assert predict(plan, profile, SPEC).duration_s >= sum(backward_s)


def test_synchronisation_of_two_replicas_takes_the_time_of_the_formula() -> None:
    """2s/w + 4 latencies for either algorithm at n = 2 (FuncPipe, section 3.3), where rounding costs nothing."""
    spec = replace(SPEC, codecs={})
    profile = chain_profile([layer("l", 70_000_000)], spec)
    for sync in (Sync.THREE_PHASE, Sync.PIPELINED):
        plan = Plan(
            global_batch=2,
            micro_batch=1,
            replicas=2,
            schedule=ScheduleKind.GPIPE,
            sync=sync,
            wire=Wire.FP32,
            stages=largest(1),
        )
        assert predict(plan, profile, spec).duration_s == pytest.approx(2 * 1.0 + 4 * 0.04)
        for wired, seconds in ((replace(plan, wire_sync=Wire.BF16), 1.0), (sharded(plan), 0.5 + 1.0)):
            assert predict(wired, profile, spec).duration_s == pytest.approx(seconds + 4 * 0.04)
            assert evaluate(wired, profile, spec).iteration_s == pytest.approx(seconds + 4 * 0.04)


@pytest.mark.parametrize("rounds", [6, 24])
@pytest.mark.parametrize("sync", [Sync.EXCHANGE, Sync.STREAMED])
def test_sums_of_a_stage_do_not_hold_up_the_stages_before_it(sync: Sync, rounds: int) -> None:
    """Eight stages, each with a second's worth of gradients: what is sent to earlier stages goes up first."""
    layers = [layer(f"l{i}", 70_000_000, forward_s=0.02, backward_s=0.2) for i in range(8)]
    profile = chain_profile(layers, SPEC, sent_bytes=10**6)
    plan = Plan(
        global_batch=8,
        micro_batch=1,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        streams=Streams(rounds, 1, rounds),
        wire=Wire.FP32,
        stages=largest(8),
    )
    predicted = predict(plan, profile, SPEC)
    assert predicted.duration_s == pytest.approx(evaluate(plan, profile, SPEC).iteration_s, rel=0.02)


def summing(size: int, replicas: int, way: SyncWay) -> tuple[Plan, ModelProfile]:
    """A stage that does nothing but sum `size` bytes."""
    layer = LayerProfile(
        name="l", parameter_bytes=size, activation_bytes=0, forward_s=(0.0,) * 8, backward_s=(0.0,) * 8
    )
    profile = ModelProfile(
        model="m", micro_batch=1, platform="aws-lambda", sizes=SIZES, base_memory_bytes=0, layers=(layer,), tensors=()
    )
    plan = Plan(
        global_batch=replicas,
        micro_batch=1,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=way.sync,
        streams=way.streams,
        wire=Wire.FP32,
        stages=(Stage(first=0, stop=1, size="10240MB", memory_mb=10240),),
    )
    return plan, profile


@pytest.mark.parametrize("size", [20_000, 250_000, 1_000_000, 16_000_000, 256_000_000])
@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 8, 16])
def test_sums_take_the_time_of_their_form_in_all_ways(replicas: int, size: int) -> None:
    """Small ones wait for latencies, and for requests to be opened: four puts, and gets for each replica."""
    spec = SPEC.size("10240MB")
    best = {
        choose(
            size,
            replicas,
            up=spec.upload_bytes_s,
            down=spec.download_bytes_s,
            price_usd_s=spec.price_usd_s,
            spec=SPEC,
            time_value=value,
        )
        for value in (0, 10, 1000)
    }
    ways = [
        *map(SyncWay, (Sync.THREE_PHASE, Sync.PIPELINED, Sync.ALL_REDUCE)),
        *(SyncWay(Sync.EXCHANGE, Streams(rounds, 1, 1)) for rounds in (1, 7)),
        SyncWay(Sync.HIERARCHICAL),
        *(SyncWay(Sync.TREE, Streams(rounds, 3, rounds)) for rounds in (1, 4)),
        *(SyncWay(choice.sync, choice.streams) for choice in best),
    ]
    for way in ways:
        plan, profile = summing(size, replicas, way)
        played_s = predict(plan, profile, SPEC).duration_s
        assert evaluate(plan, profile, SPEC).iteration_s == pytest.approx(played_s, rel=0.05), way


def sharded(plan: Plan) -> Plan:
    """Contributions in 16 bits, and updated parameters, in place of sums, in 32."""
    return replace(plan, wire_sync=Wire.BF16, shard_optimizer=True)


def test_the_gradient_of_a_tied_parameter_travels_backwards_is_summed_once_and_returns() -> None:
    """Two stages x two replicas without computation; the weight of 70 MB takes a second each way, the head has 7 MB."""
    tie = TiedParameter(name="words.weight", layers=(0, 1), parameter_bytes=70_000_000)
    profile = chain_profile([layer("words", 70_000_000), layer("head", 77_000_000)], SPEC, sent_bytes=(), ties=(tie,))
    plan = Plan(
        global_batch=2,
        micro_batch=1,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=largest(2),
    )
    assert (profile.parameter_bytes(0, 2), profile.parameter_bytes(1, 2)) == (77_000_000, 77_000_000)
    assert (profile.summed_bytes(0, 2), profile.summed_bytes(1, 2)) == (77_000_000, 7_000_000)
    there, summed, back = 2 * (1 + 0.04), 2 + 4 * 0.04, 2 * (1 + 0.04)
    assert predict(plan, profile, SPEC).duration_s == pytest.approx(there + summed + back)


def test_scaled_losses_and_clipping_let_all_stages_hear_each_other_before_they_update() -> None:
    """Two stages without bytes, one micro-batch: four transfers there and back, two more for the norms."""
    between = TensorProfile(name="a", producer=0, consumers=(1,), forward_bytes=0, backward_bytes=1)
    profile = replace(chain_profile([layer("a"), layer("b")], SPEC), tensors=(between,))
    plan = Plan(
        global_batch=1,
        micro_batch=1,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=largest(2),
    )
    assert predict(plan, profile, SPEC).duration_s == pytest.approx(4 * 0.04)
    assert predict(plan, profile, SPEC, clipped=True).duration_s == pytest.approx(6 * 0.04, abs=1e-6)
    assert predict(replace(plan, wire_back=Wire.FP16), profile, SPEC).duration_s == pytest.approx(6 * 0.04, abs=1e-6)


@pytest.mark.parametrize("ties", [(), (TiedParameter(name="t", layers=(0, 3), parameter_bytes=4 * 10**6),)])
@pytest.mark.parametrize("sync", [Sync.PIPELINED, Sync.EXCHANGE, Sync.STREAMED])
@pytest.mark.parametrize(("steps", "fragments"), [(1, 1), (4, 1), (4, 2), (32, 1)])
def test_a_round_takes_what_the_cost_model_says(
    steps: int, fragments: int, sync: Sync, ties: tuple[TiedParameter, ...]
) -> None:
    """And as many requests; with tied parameters, whose way the closed form takes to be longer, within 15 %."""
    profile = replace(reference(layers=4, parameter_bytes=60 * 10**6), ties=ties)
    plan = meeting_plan(sync, sync_every=steps, sync_fragments=fragments)
    estimate = evaluate(plan, profile, SPEC)
    played_s = mean_step_s(plan, profile, SPEC)
    assert estimate.iteration_s == pytest.approx(played_s, rel=0.05)
    met, alone = (forecast(plan, profile, SPEC, meets=meets) for meets in (True, steps == 1))
    if steps > 1:
        assert estimate.meeting_s == pytest.approx(met.duration_s, rel=0.05)
        whole = forecast(replace(plan, sync_fragments=1), profile, SPEC)
        assert moved(met) == pytest.approx(moved(whole) / fragments)
        assert met.duration_s > alone.duration_s
    others = [forecast(plan, profile, SPEC, fragment=fragment) for fragment in range(1, fragments)]
    for lane, counted in ((Resource.UPLOAD, estimate.puts), (Resource.DOWNLOAD, estimate.gets)):
        many = sum(task.kind.resource is lane for played in (met, *others) for task in played.tasks)
        few = sum(task.kind.resource is lane for task in alone.tasks)
        assert counted == round(((steps - fragments) * few + many) / steps)


LATE = [(8, 1, 1), (8, 2, 1), (8, 1, 3), (32, 4, 2)]


@pytest.mark.parametrize("megabytes", [60, 600])
@pytest.mark.parametrize("sync", [Sync.PIPELINED, Sync.EXCHANGE, Sync.STREAMED])
def test_late_meetings_take_about_what_the_cost_model_says_and_less_than_others(sync: Sync, megabytes: int) -> None:
    """Of exchanges between a tenth of a step and twice as long; within 5 %, as the form is an estimate."""
    profile = reference(layers=4, parameter_bytes=megabytes * 10**6)
    for steps, fragments, delay in LATE:
        late = meeting_plan(sync, sync_every=steps, sync_fragments=fragments, sync_delay=delay)
        at_once = replace(late, sync_delay=0)
        estimate, other = evaluate(late, profile, SPEC), evaluate(at_once, profile, SPEC)
        played_s, alone_s = mean_step_s(late, profile, SPEC), forecast(late, profile, SPEC, meets=False).duration_s
        assert estimate.iteration_s == pytest.approx(played_s, rel=0.05)
        assert (estimate.puts, estimate.gets) == (other.puts, other.gets)
        assert alone_s <= played_s < mean_step_s(at_once, profile, SPEC)
        assert estimate.iteration_s < other.iteration_s


@pytest.mark.parametrize("sync", [Sync.PIPELINED, Sync.EXCHANGE, Sync.STREAMED])
def test_a_meeting_that_is_not_late_begins_as_soon_as_its_result_allows(sync: Sync) -> None:
    """What has changed is known once a stage has updated, after its own last backward and the message that returns its
    gradient, which has the uplink first. It is sent at once, while stages before it compute.
    """
    played = forecast(meeting_plan(sync, sync_every=4), reference(layers=4, parameter_bytes=60 * 10**6), SPEC)
    events = [(Task.parse(event.task), event) for event in played.trace(run="r").events]
    ends = {
        (stage, kind): max(
            [event.end_s for task, event in events if (task.stage, task.kind) == (stage, kind)], default=0
        )
        for stage in (0, 1)
        for kind in (Kind.BACKWARD, Kind.PUT_GRADIENT)
    }
    for stage in (0, 1):
        sent = [event.start_s for task, event in events if task.stage == stage and task.kind is Kind.PUT_SPLIT]
        assert min(sent) == max(ends[stage, Kind.BACKWARD], ends[stage, Kind.PUT_GRADIENT])
    assert ends[1, Kind.PUT_GRADIENT] < ends[0, Kind.BACKWARD]


def meeting_plan(sync: Sync, **meets: int) -> Plan:
    """Two stages of two layers, with four replicas."""
    return Plan(
        global_batch=32,
        micro_batch=2,
        replicas=4,
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        wire_sync=Wire.INT8,
        wire=Wire.FP32,
        stages=tuple(
            Stage(first=first, stop=first + 2, size=SIZES[2], memory_mb=SPEC.sizes[2].memory_mb) for first in (0, 2)
        ),
        **meets,  # type: ignore[arg-type]
    )


def moved(played: Timeline) -> float:
    """Bytes that replicas send for their meeting."""
    sums = Kind.PUT_SPLIT, Kind.PUT_MERGED
    return sum(event.payload_bytes for event in played.trace(run="r").events if Task.parse(event.task).kind in sums)


@pytest.mark.parametrize("steps", [1, 8])
def test_functions_with_a_quarter_of_a_processor_do_not_wait_for_each_other(steps: int) -> None:
    """Eight of them, on two processors, are played as the closed form has them: they take no more than there is."""
    small = replace(SPEC.sizes[0], vcpu=0.25)
    spec = replace(SPEC, sizes=(small,), shared_cores=2)
    profile = chain_profile([LayerProfile(name=name, **SMALL) for name in "ab"], spec, sent_bytes=10**5, micro_batch=4)
    plan = Plan(
        global_batch=16,
        micro_batch=4,
        replicas=4,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        sync_every=steps,
        stages=tuple(Stage(first=i, stop=i + 1, size=small.name, memory_mb=small.memory_mb) for i in range(2)),
    )
    estimate = evaluate(plan, profile, spec)
    assert estimate.iteration_s == evaluate(plan, profile, replace(spec, shared_cores=None)).iteration_s
    assert mean_step_s(plan, profile, spec) == pytest.approx(estimate.iteration_s, rel=1e-6)


SMALL: dict[str, Any] = {
    "parameter_bytes": 5_000_000,
    "activation_bytes": 1000,
    "forward_s": (0.08,),
    "backward_s": (0.16,),
}


def reference(*, layers: int, parameter_bytes: int) -> ModelProfile:
    """A chain of layers that are all alike."""
    made = tuple(
        LayerProfile(
            name=f"l{i}",
            parameter_bytes=parameter_bytes,
            activation_bytes=1000,
            forward_s=(0.2,) * len(SIZES),
            backward_s=(0.4,) * len(SIZES),
        )
        for i in range(layers)
    )
    tensors = tuple(
        TensorProfile(name=f"l{i}", producer=i, consumers=(i + 1,), forward_bytes=10**6, backward_bytes=10**6)
        for i in range(layers - 1)
    )
    return ModelProfile(
        model="m", micro_batch=2, platform="aws-lambda", sizes=SIZES, base_memory_bytes=0, layers=made, tensors=tensors
    )
