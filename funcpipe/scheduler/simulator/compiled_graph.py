"""A task graph in the form that is fast to play: whole numbers, and the order of lanes as dependencies too."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import OPEN, RESOURCES, UNORDERED, Kind

Worker = tuple[int, int]
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """What each task of a graph releases when it ends, and on how many ends it waits.

    After the tasks comes one more entry for each worker, its start, on which the first tasks of its lanes wait. Tasks
    without a place in the order of their lane (`UNORDERED`) take it when it is free, open ones (`OPEN`) once their
    latency is over. `lane` numbers the lanes on which there are any; -1 is every other lane, whose order says all. An
    entry releases `released[first[entry] : first[entry + 1]]`; a list for each would be hundreds of thousands of them.
    """

    tasks: int
    workers: dict[Worker, int]
    worker_of: Sequence[int]
    first: Sequence[int]
    released: Sequence[int]
    waits: Sequence[int]
    lane: Sequence[int]
    open: Sequence[bool]

    @property
    def lanes(self) -> int:
        """How many lanes there are that have tasks without a place in their order."""
        return 1 + max(self.lane, default=-1)

    def releases(self, entry: int) -> Sequence[int]:
        """What waits on the end of `entry`."""
        return self.released[self.first[entry] : self.first[entry + 1]]


def compile_graph(graph: Graph) -> CompiledGraph:
    """`graph` with its lanes turned into dependencies."""
    tasks = graph.tasks
    count = len(tasks)
    workers: dict[Worker, int] = {}
    worker_of = np.array([workers.setdefault(task[1:3], len(workers)) for task in tasks], np.int64)
    kinds = np.array([_NUMBERS[task[0]] for task in tasks], np.int64)
    is_open, unordered = _IS_OPEN[kinds], _IS_UNORDERED[kinds]
    lane = worker_of * len(_LANES) + _LANE_OF[kinds]
    sources, targets = _needs(graph)
    before, after = _lane_order(count + worker_of, lane, unordered)
    sources, targets = np.concatenate([sources, before]), np.concatenate([targets, after])
    entries = count + len(workers)
    shared, numbers = np.unique(lane[unordered]), np.full(len(_LANES) * len(workers), -1)
    numbers[shared] = np.arange(len(shared))
    starts = [-1] * len(workers)
    return CompiledGraph(
        tasks=count,
        workers=workers,
        worker_of=worker_of.tolist() + list(range(len(workers))),
        first=[0, *np.cumsum(np.bincount(sources, minlength=entries)).tolist()],
        released=targets[np.argsort(sources, kind="stable")].tolist(),
        waits=np.bincount(targets, minlength=entries).tolist(),
        lane=numbers[lane].tolist() + starts,
        open=is_open.tolist() + [False] * len(workers),
    )


def _needs(graph: Graph) -> tuple[Array, Array]:
    """Each dependency of the graph: on what, and whose."""
    lengths = np.fromiter(map(len, graph.needs), np.int64, len(graph.needs))
    sources = np.fromiter(chain.from_iterable(graph.needs), np.int64, int(lengths.sum()))
    return sources, np.repeat(np.arange(len(lengths)), lengths)


def _lane_order(start: Array, lane: Array, unordered: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """What each task has before it: the task before on its lane; or its worker's `start`, as `unordered` ones have."""
    order = np.argsort(lane, kind="stable")
    order = order[~unordered[order]]
    before = start.copy()
    follows = lane[order[1:]] == lane[order[:-1]]
    before[order[1:][follows]] = order[:-1][follows]
    return before, np.arange(len(lane))


_NUMBERS = {kind: number for number, kind in enumerate(Kind)}
_LANES = {resource: number for number, resource in enumerate(dict.fromkeys(RESOURCES.values()))}
_LANE_OF = np.array([_LANES[RESOURCES[kind]] for kind in Kind], np.int64)
_IS_OPEN = np.array([kind in OPEN for kind in Kind])
_IS_UNORDERED = np.array([kind in UNORDERED for kind in Kind])
