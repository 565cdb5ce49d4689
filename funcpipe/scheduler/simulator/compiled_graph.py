"""A task graph compiled to integers, so that it is fast to play.

*Entries* are the tasks of the graph, by position, and after them one start for each worker. Strict lanes disappear: a
task on one depends on the task before it. What is left of the other lanes is a number for each (see `tasks.Order`), and
how many requests are open on it at once.

Shapes: `worker_of`, `waits`, `lane` and `side_by_side` have one element for each entry, `first` has one more, `room`
and `asked` have one for each lane, and `released` has one for each dependency. A list of its own for each entry would
be hundreds of thousands of lists.

For example, one worker has a forward (0), an upload that needs it (1) and a backward (2); its start is entry 3. The
backward depends on the forward, because both are on the compute lane. Forward and upload are the first things that
nothing on their lanes comes before, so they depend on the start::

    released  [1, 2, 0, 1]         waits  [1, 2, 1, 0]
    first     [0, 2, 2, 2, 4]      lane   [-1, 0, -1, -1]

When the forward ends, entries `released[0:2]` = [1, 2] each wait for one end less. Lane 0 has room for four uploads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from funcpipe.core import Resource
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import ORDERS, RESOURCES, SIDE_BY_SIDE, Kind, Order, open_requests

Worker = tuple[int, int]
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """The entries that each entry releases when it ends, and the number of ends that it waits for.

    `tasks` is the number of tasks. `lane` numbers the lanes that are not strict; it is -1 for tasks on strict lanes and
    for starts. `side_by_side` says which tasks take their lane only once their latency is over.

    `room` is how many requests of a lane may be open. Where they are opened in order, the first of them are open from
    the beginning, and each of the others, `asked`, from the end of one more: so it waits for one end more than it has
    dependencies, and the first end on its lane is that of the first of `asked`, and so on. There `room` has no end.
    """

    tasks: int
    workers: dict[Worker, int]
    worker_of: Sequence[int]
    first: Sequence[int]
    released: Sequence[int]
    waits: Sequence[int]
    lane: Sequence[int]
    side_by_side: Sequence[bool]
    room: Sequence[float]
    asked: Sequence[Sequence[int]]

    @property
    def lanes(self) -> int:
        """The number of lanes that are not strict."""
        return len(self.room)

    def releases(self, entry: int) -> Sequence[int]:
        """Return the entries that wait for the end of `entry`."""
        return self.released[self.first[entry] : self.first[entry + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphColumns:
    """A task graph as arrays: kind, by number, stage and replica of each task; and its needs, of which each is a task
    of `sources`, by position, that the one of `targets` needs. Stages have `of_replicas` replicas.

    The positions behind those of the tasks are *joins*, of one worker each: whoever needs a join needs all that it
    needs.
    """

    kinds: Array
    stages: Array
    replicas: Array
    sources: Array
    targets: Array
    of_replicas: int

    @property
    def lanes(self) -> Array:
        """The number of each task's resource, in `LANES`."""
        return LANE_OF[self.kinds]


def graph_columns(graph: Graph, of_replicas: int | None = None) -> GraphColumns:
    """Return the arrays of `graph`; without `of_replicas`, stages have as many replicas as there are."""
    tasks, count = graph.tasks, len(graph.tasks)
    lengths = np.fromiter(map(len, graph.needs), np.int64, count)
    replicas = np.fromiter((task[2] for task in tasks), np.int64, count)
    return GraphColumns(
        kinds=np.fromiter((_NUMBERS[task[0]] for task in tasks), np.int64, count),
        stages=np.fromiter((task[1] for task in tasks), np.int64, count),
        replicas=replicas,
        sources=np.fromiter(chain.from_iterable(graph.needs), np.int64, int(lengths.sum())),
        targets=np.repeat(np.arange(count), lengths),
        of_replicas=of_replicas or 1 + int(replicas.max(initial=0)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphArrays:
    """A `CompiledGraph` as arrays, without what opens requests: `lane` is that of an entry's worker and resource, in
    `LANES`, or -1 for tasks on strict lanes and for starts; `open_requests` are those of a lane of each resource.
    """

    tasks: int
    workers: dict[Worker, int]
    worker_of: Array
    first: Array
    released: Array
    waits: Array
    lane: Array
    side_by_side: npt.NDArray[np.bool_]
    open_requests: Mapping[Resource, int]


def graph_arrays(columns: GraphColumns) -> GraphArrays:
    """Return the graph of `columns` with its strict lanes turned into dependencies."""
    kinds, count = columns.kinds, len(columns.kinds)
    numbers = columns.stages * columns.of_replicas + columns.replicas
    found, first_task, worker_of = np.unique(numbers, return_index=True, return_inverse=True)
    by_first = np.argsort(first_task)
    worker_of = np.argsort(by_first)[worker_of]
    pairs = zip(*(number.tolist() for number in np.divmod(found[by_first], columns.of_replicas)), strict=True)
    workers = {worker: number for number, worker in enumerate(pairs)}
    strict = _IS_STRICT[kinds]
    lane = worker_of * len(LANES) + columns.lanes
    before, after = _lane_order(count + worker_of, lane, strict)
    starts = np.arange(len(workers))
    sources, targets = (
        np.concatenate([own + len(workers) * (own >= count), more])
        for own, more in ((columns.sources, before), (columns.targets, after))
    )
    joined = np.flatnonzero(targets >= count)
    entries = 1 + int(max(targets.max(initial=-1), count + len(workers) - 1))
    worker_of = np.concatenate([worker_of, starts, np.zeros(entries - count - len(workers), np.int64)])
    worker_of[targets[joined]] = worker_of[sources[joined]]
    nothing = np.zeros(entries - count, np.int64)
    return GraphArrays(
        tasks=count,
        workers=workers,
        worker_of=worker_of,
        first=np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=entries))]),
        released=targets[np.argsort(sources, kind="stable")],
        waits=np.bincount(targets, minlength=entries),
        lane=np.concatenate([np.where(strict, -1, lane), nothing - 1]),
        side_by_side=np.concatenate([_IS_SIDE_BY_SIDE[kinds], nothing > 0]),
        open_requests=open_requests(columns.of_replicas),
    )


def compile_graph(arrays: GraphArrays) -> CompiledGraph:
    """Return the graph of `arrays`, ready to be played event by event."""
    lane, waits = arrays.lane, arrays.waits.copy()
    shared = np.unique(lane[lane >= 0])
    room, asked = _requests(arrays.open_requests, lane, shared)
    waits[list(chain.from_iterable(asked))] += 1
    return CompiledGraph(
        tasks=arrays.tasks,
        workers=arrays.workers,
        worker_of=arrays.worker_of.tolist(),
        first=arrays.first.tolist(),
        released=arrays.released.tolist(),
        waits=waits.tolist(),
        lane=np.where(lane < 0, -1, np.searchsorted(shared, lane)).tolist(),
        side_by_side=arrays.side_by_side.tolist(),
        room=room,
        asked=asked,
    )


def _lane_order(start: Array, lane: Array, strict: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """One more dependency for each task: on the task before it on a strict lane, or else on its worker's `start`."""
    order = np.argsort(lane, kind="stable")
    order = order[strict[order]]
    before = start.copy()
    follows = lane[order[1:]] == lane[order[:-1]]
    before[order[1:][follows]] = order[:-1][follows]
    return before, np.arange(len(lane))


def _requests(limits: Mapping[Resource, int], lane: Array, shared: Array) -> tuple[list[float], list[list[int]]]:
    """Return `room` and `asked` of the lanes `shared`, where `lane` has that of each task."""
    order, room, asked = np.argsort(lane, kind="stable"), [], []
    borders = (np.searchsorted(lane, shared, side, sorter=order).tolist() for side in ("left", "right"))
    for number, start, stop in zip(shared.tolist(), *borders, strict=True):
        resource = LANES[number % len(LANES)]
        in_order = ORDERS[resource] is Order.ASKED
        room.append(math.inf if in_order else limits[resource])
        asked.append(order[start + limits[resource] : stop].tolist() if in_order else [])
    return room, asked


LANES = tuple(dict.fromkeys(RESOURCES.values()))
LANE_OF = np.array([LANES.index(RESOURCES[kind]) for kind in Kind], np.int64)
_NUMBERS = {kind: number for number, kind in enumerate(Kind)}
_IS_SIDE_BY_SIDE = np.array([kind in SIDE_BY_SIDE for kind in Kind])
_IS_STRICT = np.array([ORDERS[RESOURCES[kind]] is Order.STRICT for kind in Kind])
