"""The copies between an accelerator and its host: which there are, what waits for them, and nothing else changes."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Resource, ScheduleKind, Sync
from funcpipe.scheduler.graph import Graph, StepShape, build_graph, forward_graph
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import Kind, Task, copy_of
from tests.scheduler.shapes import chain_routes, shapes

COPIES = (Kind.ACTIVATION_TO_HOST, Kind.ACTIVATION_TO_DEVICE, Kind.GRADIENT_TO_HOST, Kind.GRADIENT_TO_DEVICE)
COPIED = (Kind.PUT_ACTIVATION, Kind.GET_ACTIVATION, Kind.PUT_GRADIENT, Kind.GET_GRADIENT)
BUS = (Resource.TO_HOST, Resource.TO_DEVICE)


def middle(micro_batches: int = 1) -> StepShape:
    """Three stages, of which the one in the middle is on an accelerator."""
    return StepShape(
        stages=3,
        replicas=1,
        micro_batches=micro_batches,
        routes=chain_routes(3),
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        accelerated=frozenset({1}),
    )


def needs_of(graph: Graph) -> Mapping[str, set[str]]:
    return {
        str(task): {str(graph.tasks[need]) for need in needs}
        for task, needs in zip(graph.tasks, graph.needs, strict=True)
    }


def test_a_message_crosses_after_its_get_and_before_its_put() -> None:
    graph = build_graph(middle())
    needs = needs_of(graph)
    assert {task: needs[task] for task in map(str, graph.of_worker(1, 0).tasks)} == {
        "get-activation.s1.r0.m0.p0.k0": {"put-activation.s0.r0.m0.k0"},
        "activation-to-device.s1.r0.m0.p0.k0": {"get-activation.s1.r0.m0.p0.k0"},
        "forward.s1.r0.m0": {"activation-to-device.s1.r0.m0.p0.k0"},
        "activation-to-host.s1.r0.m0.k0": {"forward.s1.r0.m0"},
        "put-activation.s1.r0.m0.k0": {"activation-to-host.s1.r0.m0.k0"},
        "get-gradient.s1.r0.m0.p2": {"put-gradient.s2.r0.m0.p1"},
        "gradient-to-device.s1.r0.m0.p2": {"get-gradient.s1.r0.m0.p2"},
        "backward.s1.r0.m0": {
            "forward.s1.r0.m0",
            "activation-to-host.s1.r0.m0.k0",
            "gradient-to-device.s1.r0.m0.p2",
        },
        "gradient-to-host.s1.r0.m0.p0": {"backward.s1.r0.m0"},
        "put-gradient.s1.r0.m0.p0": {"gradient-to-host.s1.r0.m0.p0"},
        "update.s1.r0": {"put-activation.s1.r0.m0.k0", "put-gradient.s1.r0.m0.p0"},
    }


def test_the_host_holds_four_messages_each_way_and_the_device_two_gradients() -> None:
    needs = needs_of(build_graph(middle(micro_batches=8)))
    assert needs["activation-to-host.s1.r0.m4.k0"] == {"forward.s1.r0.m4", "put-activation.s1.r0.m0.k0"}
    assert needs["get-activation.s1.r0.m4.p0.k0"] == {
        "activation-to-device.s1.r0.m0.p0.k0",
        "put-activation.s0.r0.m4.k0",
    }
    assert needs["get-gradient.s1.r0.m5.p2"] == {"activation-to-device.s1.r0.m6.p0.k0", "put-gradient.s2.r0.m5.p1"}
    assert needs["gradient-to-device.s1.r0.m5.p2"] == {"get-gradient.s1.r0.m5.p2", "backward.s1.r0.m7"}


@given(shapes())
def test_stages_without_accelerators_have_the_tasks_and_needs_that_they_have_without_any(shape: StepShape) -> None:
    found, plain = build_graph(shape), build_graph(replace(shape, accelerated=frozenset()))
    assert tuple(task for task in found.tasks if task.kind not in COPIES) == plain.tasks
    own, expected = needs_of(found), needs_of(plain)
    for task in plain.tasks:
        if task.stage not in shape.accelerated:
            assert own[str(task)] == expected[str(task)]


@given(shapes())
def test_each_message_of_an_accelerator_crosses_exactly_once(shape: StepShape) -> None:
    tasks = build_graph(shape).tasks
    transfers = [task for task in tasks if task.kind in COPIED and task.stage in shape.accelerated]
    assert sorted(map(str, map(copy_of, transfers))) == sorted(str(task) for task in tasks if task.kind in COPIES)
    for transfer in transfers:
        assert copy_of(transfer).kind.resource is (Resource.TO_HOST if transfer.kind.is_put else Resource.TO_DEVICE)
        assert not copy_of(transfer).kind.is_put
        assert not copy_of(transfer).kind.is_get


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 7), st.data())
def test_messages_of_an_evaluation_cross_too(stages: int, replicas: int, count: int, data: st.DataObject) -> None:
    accelerated = frozenset(data.draw(st.sets(st.integers(0, stages - 1))))
    arguments = {"stages": stages, "replicas": replicas, "micro_batches": count, "routes": chain_routes(stages)}
    found, plain = forward_graph(**arguments, accelerated=accelerated), forward_graph(**arguments)  # type: ignore[arg-type]
    crossing = [task for task in found.tasks if task.kind in COPIES]
    assert tuple(task for task in found.tasks if task not in crossing) == plain.tasks
    transfers = [task for task in plain.tasks if task.stage in accelerated and task.kind in COPIED]
    assert sorted(map(str, crossing)) == sorted(map(str, map(copy_of, transfers)))
    needs = needs_of(found)
    for task in plain.tasks:
        if task.stage in accelerated and task.kind is Kind.PUT_ACTIVATION:
            assert needs[str(task)] == {str(copy_of(task))}
        elif task.stage in accelerated and task.kind is Kind.FORWARD:
            gets = [t for t in plain.tasks if t.kind is Kind.GET_ACTIVATION and t[1:4] == task[1:4]]
            assert needs[str(task)] == {str(copy_of(get)) for get in gets}


def test_nothing_that_slows_links_and_computation_slows_the_bus() -> None:
    """Copies of 2 s, beside links that all share and computations that contention slows."""

    def cost(task: Task) -> Cost:
        if task.kind.resource in BUS:
            return Cost(2.0, 100)
        return Cost(0.1, 100, 50.0) if task.kind.is_put or task.kind.is_get else Cost(1.0)

    found = Disturbances(contention=2.0, shared_bytes_s=10.0, shared_cores=1)
    shape = replace(middle(micro_batches=4), accelerated=frozenset({0, 1, 2}))
    trace = simulate(build_graph(shape), cost, disturbances=found)
    copied = [event for event in trace.events if event.lane in BUS]
    assert len(copied) == 4 * 8
    assert {(round(event.end_s - event.start_s, 9), event.payload_bytes) for event in copied} == {(2.0, 100)}
    assert any(event.end_s - event.start_s > 1.5 for event in trace.events if event.lane is Resource.COMPUTE)
