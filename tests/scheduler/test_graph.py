from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Resource, ScheduleKind, Streams, Sync, TensorProfile, TieRoute, find_routes
from funcpipe.errors import PlanError
from funcpipe.scheduler.graph import AHEAD, Graph, StepShape, build_graph, forward_graph
from funcpipe.scheduler.late import LatePart
from funcpipe.scheduler.pipeline import actions
from funcpipe.scheduler.tasks import Kind, Task, source_of
from tests.scheduler.check import check, workers_of
from tests.scheduler.shapes import chain_routes, shapes


def small(replicas: int = 2, sync: Sync = Sync.PIPELINED) -> StepShape:
    return StepShape(
        stages=2,
        replicas=replicas,
        micro_batches=2,
        routes=chain_routes(2),
        schedule=ScheduleKind.GPIPE,
        sync=sync,
    )


@given(shapes())
def test_every_graph_can_be_run_to_its_end(shape: StepShape) -> None:
    check(build_graph(shape))


@given(shapes())
def test_each_micro_batch_goes_forward_and_back_once_on_the_replica_it_belongs_to(shape: StepShape) -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        found = sorted(
            (task.stage, task.replica, task.micro_batch or 0) for task in build_graph(shape).tasks if task.kind is kind
        )
        assert found == sorted(
            (stage, m % shape.replicas, m) for stage in range(shape.stages) for m in range(shape.micro_batches)
        )


def test_gpipe_runs_all_forwards_then_all_backwards_in_descending_order() -> None:
    assert " ".join(map(str, actions(ScheduleKind.GPIPE, [0, 2, 4]))) == "F0 F2 F4 B4 B2 B0"


def test_the_lanes_of_a_small_graph() -> None:
    graph = build_graph(small())
    lanes = {
        f"s{lane.stage}.r{lane.replica} {lane.resource.value}": " ".join(
            str(graph.tasks[i]).replace(f".s{lane.stage}.r{lane.replica}", "") for i in positions
        )
        for lane, positions in graph.lanes().items()
        if lane.replica == 0
    }
    assert lanes == {
        "s0.r0 compute": "forward.m0 backward.m0 flatten update",
        "s0.r0 merge": "merge.k0",
        "s0.r0 upload": "put-activation.m0.k0 put-split.k0 put-merged.k0",
        "s0.r0 download": "get-gradient.m0.p1 get-split.p1.k0 get-merged.p1.k0",
        "s1.r0 compute": "forward.m0 backward.m0 flatten update",
        "s1.r0 merge": "merge.k0",
        "s1.r0 upload": "put-gradient.m0.p0 put-split.k0 put-merged.k0",
        "s1.r0 download": "get-activation.m0.p0.k0 get-split.p1.k0 get-merged.p1.k0",
    }


def test_the_last_stage_computes_one_loss_between_all_forwards_and_all_backwards() -> None:
    graph = build_graph(replace(small(), micro_batches=4, joint_loss=True))
    check(graph)
    last = [(str(task), needs) for task, needs in zip(graph.tasks, graph.needs, strict=True) if task.stage == 1]
    needs = {task: {str(graph.tasks[need]) for need in some} for task, some in last}
    assert needs["put-outputs.s1.r0"] == {"forward.s1.r0.m2"}
    assert needs["get-outputs.s1.r0.p1"] == {"forward.s1.r0.m2", "put-outputs.s1.r1"}
    assert needs["joint-loss.s1.r0"] == {"forward.s1.r0.m2", "get-outputs.s1.r0.p1"}
    assert all("joint-loss.s1.r0" in needs[f"backward.s1.r0.m{m}"] for m in (0, 2))
    assert [
        task for task, _ in last if ".r0" in task and task.split(".")[0] in ("forward", "joint-loss", "backward")
    ] == [
        *("forward.s1.r0.m0", "forward.s1.r0.m2"),
        "joint-loss.s1.r0",
        *("backward.s1.r0.m2", "backward.s1.r0.m0"),
    ]
    assert not any("joint" in str(task) or "outputs" in str(task) for task in graph.tasks if task.stage == 0)


def test_replicas_without_micro_batches_exchange_no_outputs() -> None:
    """Of a short batch; one that is alone in having any exchanges nothing either."""
    for micro_batches, expected in ((1, (0, 0, 1)), (2, (2, 2, 2)), (3, (3, 6, 3))):
        graph = build_graph(replace(small(4), micro_batches=micro_batches, joint_loss=True))
        check(graph)
        kinds = [task.kind for task in graph.tasks]
        assert tuple(kinds.count(kind) for kind in (Kind.PUT_OUTPUTS, Kind.GET_OUTPUTS, Kind.JOINT_LOSS)) == expected


def test_a_part_of_the_last_backward_waits_for_the_loss_too() -> None:
    shape = replace(small(sync=Sync.STREAMED), stages=1, routes=chain_routes(1), streams=Streams(3, 1, 1))
    graph = build_graph(replace(shape, joint_loss=True))
    check(graph)
    first = next(i for i, task in enumerate(graph.tasks) if task.kind is Kind.BUCKET)
    assert "joint-loss.s0.r0" in {str(graph.tasks[need]) for need in graph.needs[first]}


def test_streaming_one_round_is_three_phase_without_its_barriers() -> None:
    streamed = build_graph(replace(small(3, Sync.STREAMED), streams=Streams(1, 2, 1)))
    phased = build_graph(small(3, Sync.THREE_PHASE))
    assert streamed.tasks == phased.tasks
    before = [i for i, task in enumerate(streamed.tasks) if task.kind is not Kind.UPDATE]
    assert all(set(streamed.needs[i]) <= set(phased.needs[i]) for i in before)
    assert streamed.needs != phased.needs


def test_algorithms_order_the_same_lanes() -> None:
    pipelined, phased = build_graph(small(3)), build_graph(small(3, Sync.THREE_PHASE))
    for lane, positions in pipelined.lanes().items():
        assert [pipelined.tasks[i] for i in positions] == [phased.tasks[i] for i in phased.lanes()[lane]]


@given(shapes(), st.data())
def test_the_check_finds_a_missing_task(shape: StepShape, data: st.DataObject) -> None:
    """A graph without any one of its transfers, forwards, backwards or updates breaks a rule."""
    graph = build_graph(shape)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
    removable = [i for i, t in enumerate(graph.tasks) if t.kind in kinds or t.kind.is_put]
    gone = data.draw(st.sampled_from(removable))
    with pytest.raises(PlanError, match="the task graph breaks rule"):
        check(without(graph, gone), workers_of(graph))


def test_the_check_finds_a_worker_that_would_have_updated_alone() -> None:
    """Of two replicas, one has no micro-batch of a short batch."""
    shape = replace(small(), stages=1, micro_batches=1, routes=chain_routes(1), sync=Sync.THREE_PHASE, streams=None)
    graph = build_graph(replace(shape, alone=True, meets=False))
    assert str(graph.tasks[-1]) == "update.s0.r1"
    with pytest.raises(PlanError, match=r"rule 6: s0\.r1 never updates"):
        check(without(graph, len(graph.tasks) - 1), workers_of(graph))


def without(graph: Graph, gone: int) -> Graph:
    kept = [i for i in range(len(graph.tasks)) if i != gone]
    place = {old: new for new, old in enumerate(kept)}
    needs = tuple(tuple(place[need] for need in graph.needs[i] if need != gone) for i in kept)
    return Graph(tuple(graph.tasks[i] for i in kept), needs)


@given(shapes())
def test_replicas_that_train_alone_meet_in_one_exchange_or_in_none(shape: StepShape) -> None:
    """Alone, no worker needs one of another replica, but for a loss of all; a meeting sums as gradients are summed."""
    shape = replace(shape, alone=True, joint_loss=False, fragments=())
    alone, meeting = (build_graph(replace(shape, meets=meets)) for meets in (False, True))
    for task, needs in zip(alone.tasks, alone.needs, strict=True):
        assert {alone.tasks[need].replica for need in needs} <= {task.replica}
    if shape.replicas == 1:
        assert meeting == alone
        return
    every = build_graph(replace(shape, alone=False, meets=True, joint_loss=False))
    sums = (*(Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.MERGE, Kind.PUT_MERGED, Kind.GET_MERGED), Kind.FLATTEN)
    assert [task for task in meeting.tasks if task.kind in sums] == [task for task in every.tasks if task.kind in sums]
    added = {task for task in meeting.tasks if task.kind not in sums} - set(alone.tasks)
    assert {task.kind for task in added} <= {Kind.LOCAL_UPDATE, Kind.PUT_TIED_SUM, Kind.GET_TIED_SUM}
    ties = len(shape.routes.ties)
    tied = {task._replace(part=ties + (task.part or 0)) for task in alone.tasks if "tied-sum" in task.kind.value}
    assert {task for task in added if task.kind is not Kind.LOCAL_UPDATE} == tied


@given(shapes())
def test_fragments_meet_each_in_an_exchange_of_its_own(shape: StepShape) -> None:
    """Which is that of all parameters; tied ones meet with the first fragment."""
    whole = build_graph(replace(shape, alone=True, meets=True, joint_loss=False, fragments=()))
    sums = (*(Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.MERGE, Kind.PUT_MERGED, Kind.GET_MERGED), Kind.FLATTEN)
    for fragments in ((0,), (1,), (0, 2)):
        graph = build_graph(replace(shape, alone=True, meets=True, joint_loss=False, fragments=fragments))
        check(graph)
        for fragment in fragments if shape.replicas > 1 else ():
            own = [task for task in graph.tasks if task.fragment == fragment]
            assert [task._replace(fragment=None) for task in own] == [task for task in whole.tasks if task.kind in sums]
        beside = {task for task in graph.tasks if task.fragment is None}
        gone = {task for task in whole.tasks if task.kind not in sums} - beside
        assert {task.kind for task in gone} <= {Kind.PUT_TIED_SUM, Kind.GET_TIED_SUM}
        assert beside <= set(whole.tasks)
        assert not gone or 0 not in fragments


@given(shapes(), st.integers(0, 1), st.integers(1, 4))
def test_a_late_meeting_is_spread_over_the_steps_beside_it(shape: StepShape, fragment: int, delay: int) -> None:
    """Their parts together are one exchange; and so is what a worker does in the last step that begins anew."""
    shape = replace(shape, alone=True, joint_loss=False, fragments=())
    sums = (*(Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.MERGE, Kind.PUT_MERGED, Kind.GET_MERGED), Kind.FLATTEN)
    whole = {task for task in build_graph(replace(shape, meets=True)).tasks if task.kind in sums}
    parts = [build_graph(replace(shape, late=LatePart(fragment, delay, place, place))) for place in range(delay)]
    anew = build_graph(replace(shape, late=LatePart(fragment, delay, 0, delay - 1)))
    for graph in (*parts, anew):
        check(graph)
    late = [task for graph in parts for task in graph.tasks if task.delay is not None]
    assert len(late) == len(set(late))
    assert set(late) == {task for task in anew.tasks if task.delay is not None}
    found = {task._replace(fragment=None, delay=None) for task in late if task.kind in sums}
    assert found == whole


def test_the_lanes_of_a_small_meeting() -> None:
    graph = build_graph(replace(small(), alone=True, norms=True))
    check(graph)
    lanes = {
        lane.resource.value: " ".join(str(graph.tasks[i]).replace(".s0.r0", "") for i in positions)
        for lane, positions in graph.lanes().items()
        if (lane.stage, lane.replica) == (0, 0)
    }
    assert lanes == {
        "compute": "forward.m0 backward.m0 norm local-update flatten update",
        "merge": "merge.k0",
        "upload": "put-activation.m0.k0 put-norm put-split.k0 put-merged.k0",
        "download": "get-gradient.m0.p1 get-norm.p1 get-split.p1.k0 get-merged.p1.k0",
    }
    needs = graph.needs[graph.tasks.index(Task(Kind.LOCAL_UPDATE, 0, 0))]
    assert {str(graph.tasks[need]) for need in needs} == {"get-norm.s0.r0.p1", "put-norm.s0.r0"}


def test_each_rule_is_checked() -> None:
    graph = build_graph(small())
    tasks, needs = graph.tasks, graph.needs
    place = {str(task): i for i, task in enumerate(tasks)}

    def with_need(task: str, need: str) -> Graph:
        changed = list(needs)
        changed[place[task]] = (*needs[place[task]], place[need])
        return Graph(tasks, tuple(changed))

    with pytest.raises(PlanError, match=r"rule 1: forward.s0.r0.m0 is listed 2 times"):
        check(Graph((*tasks, tasks[0]), (*needs, needs[0])))
    with pytest.raises(PlanError, match=r"rule 2: no task writes put-activation.s0.r0.m0.k0"):
        check(without(graph, place["put-activation.s0.r0.m0.k0"]))
    with pytest.raises(PlanError, match=r"rule 3: no task reads what put-merged.s0.r0.k0 writes"):
        check(without(graph, place["get-merged.s0.r1.p0.k0"]))
    with pytest.raises(PlanError, match=r"rule 4: forward.s1.r0.m0 needs forward.s0.r0.m0 of another worker"):
        check(with_need("forward.s1.r0.m0", "forward.s0.r0.m0"))
    with pytest.raises(PlanError, match=r"rule 5: .*no backward"):
        check(without(graph, place["backward.s1.r0.m0"]))
    with pytest.raises(PlanError, match=r"rule 6: s0.r0 never updates"):
        check(without(graph, place["update.s0.r0"]))
    with pytest.raises(PlanError, match=r"rule 7: .* waits for "):
        check(with_need("forward.s0.r0.m0", "update.s0.r0"))
    unasked = list(needs)
    unasked[place["get-merged.s0.r0.p1.k0"]] = (place["put-merged.s0.r1.k0"],)
    with pytest.raises(PlanError, match=r"rule 8: get-merged\S* may be asked for before get-split"):
        check(Graph(tasks, tuple(unasked)))


def test_lanes_in_a_bad_order_are_a_deadlock() -> None:
    graph = build_graph(replace(small(1), micro_batches=2))
    order = list(range(len(graph.tasks)))
    place = {str(task): i for i, task in enumerate(graph.tasks)}
    first, second = place["put-activation.s0.r0.m0.k0"], place["put-activation.s0.r0.m1.k0"]
    order[first], order[second] = order[second], order[first]
    moved = {old: new for new, old in enumerate(order)}
    swapped = Graph(
        tuple(graph.tasks[i] for i in order), tuple(tuple(moved[need] for need in graph.needs[i]) for i in order)
    )
    check(swapped)  # the reader simply takes them later
    backward_first = list(range(len(graph.tasks)))
    forward, backward = place["forward.s0.r0.m0"], place["backward.s0.r0.m0"]
    backward_first[forward], backward_first[backward] = backward, forward
    moved = {old: new for new, old in enumerate(backward_first)}
    with pytest.raises(PlanError, match="rule 7"):
        check(
            Graph(
                tuple(graph.tasks[i] for i in backward_first),
                tuple(tuple(moved[need] for need in graph.needs[i]) for i in backward_first),
            )
        )


def test_a_worker_s_part_keeps_its_order_and_its_own_needs() -> None:
    graph = build_graph(small())
    part = graph.of_worker(1, 0)
    assert {(t.stage, t.replica) for t in part.tasks} == {(1, 0)}
    assert [str(t) for t in part.tasks] == [str(t) for t in graph.tasks if (t.stage, t.replica) == (1, 0)]
    forward = part.tasks.index(Task.parse("forward.s1.r0.m0"))
    assert [str(part.tasks[need]) for need in part.needs[forward]] == ["get-activation.s1.r0.m0.p0.k0"]


def test_a_round_of_the_synchronisation_waits_for_its_bucket_alone() -> None:
    """Of three rounds of the first stage two may begin while the last backward runs."""
    graph = build_graph(replace(small(), micro_batches=4, sync=Sync.STREAMED, streams=Streams(3, 1, 3)))
    needs = {
        str(task): {str(graph.tasks[i]) for i in found} for task, found in zip(graph.tasks, graph.needs, strict=True)
    }
    assert needs["put-split.s0.r0.k0"] == {"bucket.s0.r0.m0.k0"}
    assert needs["put-split.s0.r0.k1"] == {"bucket.s0.r0.m0.k1"}
    assert needs["put-split.s0.r0.k2"] == {"flatten.s0.r0"}
    assert needs["bucket.s0.r0.m0.k1"] == {"forward.s0.r0.m0", "bucket.s0.r0.m0.k0"}
    assert needs["backward.s0.r0.m0.k2"] == {"forward.s0.r0.m0", "bucket.s0.r0.m0.k1"}
    lanes = {
        lane.resource: [str(graph.tasks[i]) for i in found] for lane, found in graph.lanes().items() if lane.stage == 0
    }
    assert lanes[Resource.MERGE] == ["merge.s0.r1.k0", "merge.s0.r1.k1", "merge.s0.r1.k2"]


def test_stages_that_send_gradients_of_activations_have_no_buckets() -> None:
    """Other stages wait for these, so they go up before anything of the synchronisation."""
    graph = build_graph(replace(small(), micro_batches=4, sync=Sync.STREAMED, streams=Streams(3, 1, 3)))
    assert {task.stage for task in graph.tasks if task.kind is Kind.BUCKET} == {0}
    needs = {
        str(task): {str(graph.tasks[i]) for i in found} for task, found in zip(graph.tasks, graph.needs, strict=True)
    }
    assert needs["put-split.s1.r0.k0"] == {"flatten.s1.r0"}
    uploads = next(
        [str(graph.tasks[i]) for i in found]
        for lane, found in graph.lanes().items()
        if (lane.stage, lane.replica, lane.resource) == (1, 1, Resource.UPLOAD)
    )
    assert uploads.index("put-gradient.s1.r1.m1.p0") < uploads.index("put-split.s1.r1.k0")


def test_stages_that_add_tied_gradients_have_no_buckets() -> None:
    """What later stages found is known after the backward only."""
    routes = replace(chain_routes(2), ties=(TieRoute(stages=(0, 1), parameters=("w",), payload_bytes=4),))
    graph = build_graph(replace(small(), routes=routes, sync=Sync.STREAMED, streams=Streams(3, 1, 3)))
    assert not any(task.kind is Kind.BUCKET for task in graph.tasks)


def test_the_readers_of_an_object() -> None:
    readers = {str(put): [str(get) for get in gets] for put, gets in build_graph(small()).readers().items()}
    assert readers["put-activation.s0.r0.m0.k0"] == ["get-activation.s1.r0.m0.p0.k0"]
    assert readers["put-merged.s1.r1.k0"] == ["get-merged.s1.r0.p1.k0"]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 7))
def test_every_micro_batch_passes_all_stages_of_its_replica_once(stages: int, replicas: int, count: int) -> None:
    tensors = [
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=4, backward_bytes=0)
        for i in range(stages - 1)
    ]
    graph = forward_graph(
        stages=stages, replicas=replicas, micro_batches=count, routes=find_routes(range(stages), tensors, ())
    )
    forwards = [task for task in graph.tasks if task.kind is Kind.FORWARD]
    assert sorted((t.stage, t.micro_batch) for t in forwards) == [(s, m) for s in range(stages) for m in range(count)]
    assert all(task.micro_batch is not None and task.micro_batch % replicas == task.replica for task in graph.tasks)
    assert {t.kind for t in graph.tasks} <= {Kind.FORWARD, Kind.PUT_ACTIVATION, Kind.GET_ACTIVATION}
    for position, task in enumerate(graph.tasks):
        needs = {graph.tasks[need] for need in graph.needs[position]}
        if task.kind is Kind.GET_ACTIVATION:
            assert source_of(task) in needs
            assert task.micro_batch is not None
            before = task.micro_batch - AHEAD * replicas
            assert before < 0 or Task(Kind.FORWARD, task.stage, task.replica, before) in needs
        elif task.kind is Kind.PUT_ACTIVATION:
            assert Task(Kind.FORWARD, task.stage, task.replica, task.micro_batch) in needs
