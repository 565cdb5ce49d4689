"""The task graph of a batch that is only evaluated: forwards, and activations from stage to stage."""

from funcpipe.core import Routes
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.pipeline import find_links
from funcpipe.scheduler.tasks import Kind, Task, source_of

AHEAD = 2
"""The number of micro-batches that a stage may have received and not begun with."""


def forward_graph(*, stages: int, replicas: int, micro_batches: int, routes: Routes) -> Graph:
    """Return the tasks of all workers for so many micro-batches; micro-batch m belongs to replica m mod `replicas`."""
    links = find_links(routes, stages)
    tasks: list[Task] = []
    needs: list[tuple[int, ...]] = []
    place: dict[Task, int] = {}

    def add(task: Task, *needed: Task) -> Task:
        place[task] = len(tasks)
        tasks.append(task)
        needs.append(tuple(place[need] for need in needed))
        return task

    for stage in range(stages):
        for replica in range(replicas):
            done: list[Task] = []
            for m in range(replica, micro_batches, replicas):
                room = done[-AHEAD:][:1] if len(done) >= AHEAD else []
                gets = [
                    add(Task(Kind.GET_ACTIVATION, stage, replica, m, producer, part), *room)
                    for producer, part in links[stage].reads
                ]
                done.append(add(Task(Kind.FORWARD, stage, replica, m), *gets))
                for part in links[stage].writes:
                    add(Task(Kind.PUT_ACTIVATION, stage, replica, m, None, part), done[-1])
    for task, position in place.items():
        if task.kind is Kind.GET_ACTIVATION:
            needs[position] += (place[source_of(task)],)
    return Graph(tuple(tasks), tuple(needs))
