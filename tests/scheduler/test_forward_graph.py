"""The task graph of a batch that is only evaluated."""

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import TensorProfile, find_routes
from funcpipe.scheduler.forward_graph import AHEAD, forward_graph
from funcpipe.scheduler.tasks import Kind, Task, source_of


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
