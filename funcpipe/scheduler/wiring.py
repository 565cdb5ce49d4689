"""A task graph in the form that is fast to play: whole numbers, and the order of lanes as dependencies too."""

from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.scheduler.graph import Graph

Worker = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wiring:
    """What each task of a graph releases when it ends, and on how many ends it waits.

    After the tasks comes one more entry for each worker, its start, on which the first tasks of its lanes wait.
    """

    tasks: int
    workers: dict[Worker, int]
    worker_of: Sequence[int]
    releases: Sequence[Sequence[int]]
    waits: Sequence[int]


def wire(graph: Graph) -> Wiring:
    """`graph` with its lanes turned into dependencies."""
    count = len(graph.tasks)
    workers: dict[Worker, int] = {}
    worker_of = [workers.setdefault((task.stage, task.replica), len(workers)) for task in graph.tasks]
    releases: list[list[int]] = [[] for _ in range(count + len(workers))]
    waits = [len(needs) + 1 for needs in graph.needs] + [0] * len(workers)
    for position, needs in enumerate(graph.needs):
        for need in needs:
            releases[need].append(position)
    for positions in graph.lanes().values():
        before = count + worker_of[positions[0]]
        for position in positions:
            releases[before].append(position)
            before = position
    return Wiring(count, workers, worker_of + list(range(len(workers))), releases, waits)
