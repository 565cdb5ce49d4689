"""Proof that a task graph can be run to its end.

1. No task is listed twice.
2. Every object that is read is written, by exactly one task.
3. Every object that is written is read by at least one task.
4. Every need is a task of the same worker, or the put of the object that the task reads.
5. Every forward has its backward, and the backward needs the forward.
6. Every worker ends with its update, which comes after everything else that the worker does.
7. If each lane takes its tasks in order, no tasks wait for each other in a circle: no deadlock, whatever the speeds.
8. What a get needs of its own worker has ended before that worker may ask for what a later get reads.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from funcpipe.errors import PlanError
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import ORDERS, Kind, Order, source_of


def workers_of(graph: Graph) -> frozenset[tuple[int, int]]:
    """The stage and the replica of each worker that has a task."""
    return frozenset((task.stage, task.replica) for task in graph.tasks)


def check(graph: Graph, workers: frozenset[tuple[int, int]] = frozenset()) -> None:
    """Raise PlanError with the number of the rule that `graph` breaks, and the task concerned.

    It must have `workers`, besides those that have a task.
    """
    _each_task_once(graph)
    _objects_are_written_and_read(graph)
    _needs_are_local_or_read(graph)
    _backward_follows_forward(graph)
    _update_comes_last(graph, workers_of(graph) | workers)
    _can_end(graph)
    _asks_in_order(graph)


def _fail(rule: int, what: object) -> PlanError:
    return PlanError(f"the task graph breaks rule {rule}: {what}")


def _each_task_once(graph: Graph) -> None:
    for task, count in Counter(graph.tasks).items():
        if count > 1:
            raise _fail(1, f"{task} is listed {count} times")


def _objects_are_written_and_read(graph: Graph) -> None:
    puts = {task for task in graph.tasks if task.kind.is_put}
    read = {source_of(task) for task in graph.tasks if task.kind.is_get}
    for missing in sorted(map(str, read - puts)):
        raise _fail(2, f"no task writes {missing}, which is read")
    for unread in sorted(map(str, puts - read)):
        raise _fail(3, f"no task reads what {unread} writes")


def _needs_are_local_or_read(graph: Graph) -> None:
    for task, needs in zip(graph.tasks, graph.needs, strict=True):
        for need in (graph.tasks[position] for position in needs):
            local = (need.stage, need.replica) == (task.stage, task.replica)
            if not local and not (task.kind.is_get and source_of(task) == need):
                raise _fail(4, f"{task} needs {need} of another worker")


def _backward_follows_forward(graph: Graph) -> None:
    waiting = {(t.stage, t.replica, t.micro_batch) for t in graph.tasks if t.kind is Kind.FORWARD}
    for task, needs in zip(graph.tasks, graph.needs, strict=True):
        if task.kind is not Kind.BACKWARD:
            continue
        key = (task.stage, task.replica, task.micro_batch)
        needed = {graph.tasks[position] for position in needs}
        if key not in waiting or not any(
            n.kind is Kind.FORWARD and n.micro_batch == task.micro_batch and n.stage == task.stage for n in needed
        ):
            raise _fail(5, f"{task} does not follow its forward")
        waiting.remove(key)
    for stage, replica, micro_batch in sorted(waiting):
        raise _fail(5, f"the forward of micro-batch {micro_batch} on s{stage}.r{replica} has no backward")


def _update_comes_last(graph: Graph, workers: frozenset[tuple[int, int]]) -> None:
    followed = [False] * len(graph.tasks)
    updates = {(t.stage, t.replica): i for i, t in enumerate(graph.tasks) if t.kind is Kind.UPDATE}
    for worker in sorted(workers):
        if worker not in updates:
            raise _fail(6, f"s{worker[0]}.r{worker[1]} never updates")
        _mark_before(graph, updates[worker], followed)
    for task, seen in zip(graph.tasks, followed, strict=True):
        if not seen:
            raise _fail(6, f"{task} does not come before its worker's update")


def _mark_before(graph: Graph, position: int, followed: list[bool]) -> None:
    stack = [position]
    while stack:
        current = stack.pop()
        if not followed[current]:
            followed[current] = True
            stack.extend(graph.needs[current])


def _can_end(graph: Graph) -> None:
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for position, needs in enumerate(graph.needs):
        sorter.add(position, *needs)
    for lane in graph.lanes().values():
        for before, after in itertools.pairwise(lane):
            sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " waits for ".join(str(graph.tasks[position]) for position in reversed(error.args[1]))
        raise _fail(7, cycle) from error


def _asks_in_order(graph: Graph) -> None:
    lanes = graph.lanes()
    before = {
        later: earlier
        for lane, positions in lanes.items()
        if ORDERS[lane.resource] is Order.STRICT
        for earlier, later in itertools.pairwise(positions)
    }
    for lane, positions in lanes.items():
        if ORDERS[lane.resource] is Order.ASKED:
            for earlier, later in itertools.pairwise(positions):
                needs = {need for need in graph.needs[earlier] if source_of(graph.tasks[earlier]) != graph.tasks[need]}
                if not needs <= _local_before(graph, later, before):
                    raise _fail(8, f"{graph.tasks[later]} may be asked for before {graph.tasks[earlier]}")


def _local_before(graph: Graph, position: int, before: Mapping[int, int]) -> set[int]:
    """What the task at `position` waits for in its own worker, directly or not."""
    worker = graph.tasks[position][1:3]
    found: set[int] = set()
    stack = [position]
    while stack:
        current = stack.pop()
        needs = {*graph.needs[current], *([before[current]] if current in before else [])}
        new = {need for need in needs if graph.tasks[need][1:3] == worker} - found
        found |= new
        stack.extend(new)
    return found
