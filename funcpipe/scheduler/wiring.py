"""A task graph in the form that is fast to play: whole numbers, and the order of lanes as dependencies too."""

from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import OPEN

Worker = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wiring:
    """What each task of a graph releases when it ends, and on how many ends it waits.

    After the tasks comes one more entry for each worker, its start, on which the first tasks of its lanes wait. Open
    tasks (`OPEN`) have no place in the order of their lane: they take it when their latency is over and it is free.
    `lane` numbers the lanes on which there are any; -1 is every other lane, whose order says all.
    """

    tasks: int
    workers: dict[Worker, int]
    worker_of: Sequence[int]
    releases: Sequence[Sequence[int]]
    waits: Sequence[int]
    lane: Sequence[int]
    open: Sequence[bool]

    @property
    def lanes(self) -> int:
        """How many lanes there are that have open tasks."""
        return 1 + max(self.lane, default=-1)


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
    is_open = [task[0] in OPEN for task in graph.tasks] + [False] * len(workers)
    lane, lanes = [-1] * (count + len(workers)), 0
    for positions in graph.lanes().values():
        before = start = count + worker_of[positions[0]]
        shared = any(is_open[position] for position in positions)
        for position in positions:
            if shared:
                lane[position] = lanes
            if is_open[position]:
                releases[start].append(position)
            else:
                releases[before].append(position)
                before = position
        lanes += shared
    return Wiring(count, workers, worker_of + list(range(len(workers))), releases, waits, lane, is_open)
