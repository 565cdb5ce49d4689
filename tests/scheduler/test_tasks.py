import pytest
from hypothesis import given

from funcpipe.errors import InvalidValue
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.tasks import Kind, Task, source_of
from tests.scheduler.shapes import shapes


@given(shapes())
def test_every_task_prints_and_reads_back(shape: StepShape) -> None:
    tasks = build_graph(shape).tasks
    assert [Task.parse(str(task)) for task in tasks] == list(tasks)
    assert len({str(task) for task in tasks}) == len(tasks)


def test_a_task_prints_short() -> None:
    assert str(Task(Kind.FORWARD, 0, 1, micro_batch=3)) == "forward.s0.r1.m3"
    assert str(Task(Kind.GET_ACTIVATION, 2, 0, micro_batch=3, peer=0, part=1)) == "get-activation.s2.r0.m3.p0.k1"


@pytest.mark.parametrize("text", ["", "forward", "forward.s0", "jump.s0.r0", "forward.s0.r1.m3.x1", "forward.s-1.r0"])
def test_other_text_is_no_task(text: str) -> None:
    with pytest.raises(InvalidValue, match="must read like 'forward"):
        Task.parse(text)


def test_a_get_reads_what_its_peer_put() -> None:
    assert str(source_of(Task.parse("get-activation.s2.r1.m3.p0.k1"))) == "put-activation.s0.r1.m3.k1"
    assert str(source_of(Task.parse("get-gradient.s0.r1.m3.p2"))) == "put-gradient.s2.r1.m3.p0"
    assert str(source_of(Task.parse("get-split.s0.r1.p2.k1"))) == "put-split.s0.r2.k1"
    assert str(source_of(Task.parse("get-merged.s0.r1.p2.k2"))) == "put-merged.s0.r2.k2"
    assert str(source_of(Task.parse("get-split.s0.r1.p2.k1.f0"))) == "put-split.s0.r2.k1.f0"
    assert str(source_of(Task.parse("get-merged.s0.r1.p2.k2.f3"))) == "put-merged.s0.r2.k2.f3"


def test_what_is_no_get_reads_nothing() -> None:
    with pytest.raises(InvalidValue, match="must be a get"):
        source_of(Task(Kind.PUT_SPLIT, 0, 0, peer=1, part=0))
