import threading

from funcpipe.core import ScheduleKind, Sync, WorkerId
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.worker.step_graph import MessageGC, StepMessages, most_objects, readers_of, upstream_of
from tests.scheduler.shapes import chain_routes

A, B = (0, 0), (1, 0)


def test_a_message_may_go_once_all_its_readers_were_heard_of_in_a_later_step_and_are_saved() -> None:
    messages = MessageGC((0, 0))
    messages.add_step(0, StepMessages({"k0": frozenset({A, B})}, frozenset({A, B})))
    assert messages.collect(lambda worker: 9) == []  # nobody was heard of since
    messages.add_step(1, StepMessages({"k1": frozenset({A})}, frozenset({A})))
    assert messages.collect(lambda worker: 9) == []  # B was not
    messages.add_step(2, StepMessages({}, frozenset({A, B})))
    assert messages.collect({A: 0, B: 1}.__getitem__) == []  # A would read k0 again
    assert messages.collect({A: 1, B: 1}.__getitem__) == ["k0"]
    assert messages.collect({A: 2, B: 0}.__getitem__) == ["k1"]
    assert messages.collect(lambda worker: 9) == []


def test_what_readers_have_yet_to_cover_is_remembered() -> None:
    messages = MessageGC(A)
    messages.add_step(0, StepMessages({"k0": frozenset({A})}, frozenset({A})))
    assert not messages.keeps_before(9)  # nobody was heard of since
    messages.add_step(1, StepMessages({"k1": frozenset({A})}, frozenset({A})))
    assert messages.keeps_before(1)
    assert not messages.keeps_before(0)
    messages.collect({A: 1}.__getitem__)
    assert not messages.keeps_before(9)


def test_messages_that_are_added_while_others_are_collected_are_not_forgotten() -> None:
    messages = MessageGC(A)
    messages.add_step(0, StepMessages({"k0": frozenset({A})}, frozenset({A})))
    messages.add_step(1, StepMessages({"k1": frozenset({A})}, frozenset({A})))
    adding = threading.Thread(target=messages.add_step, args=(2, StepMessages({}, frozenset({A}))))

    def restart_step(worker: WorkerId) -> int:
        if not adding.is_alive():
            adding.start()
            adding.join(0.05)  # it has to wait until the messages are collected
        return 1

    assert messages.collect(restart_step) == ["k0"]
    adding.join()
    assert messages.collect(lambda worker: 2) == ["k1"]


def test_who_reads_and_who_is_heard_of_follow_from_the_graph() -> None:
    graph = build_graph(
        StepShape(
            stages=2,
            replicas=2,
            micro_batches=1,  # replica 1 has none
            routes=chain_routes(2),
            schedule=ScheduleKind.GPIPE,
            sync=Sync.PIPELINED,
        )
    )
    assert upstream_of(graph, (0, 0)) == {(1, 0), (0, 1)}
    assert upstream_of(graph, (0, 1)) == {(0, 0), (1, 0)}  # of the second by way of the first
    assert most_objects(graph) == 3
    assert {str(put): readers for put, readers in readers_of(graph, (0, 0)).items()} == {
        "put-activation.s0.r0.m0.k0": {(1, 0)},
        "put-split.s0.r0.k0": {(0, 1)},
        "put-merged.s0.r0.k0": {(0, 1)},
    }
