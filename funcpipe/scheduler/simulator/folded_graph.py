"""The task graph of a step of which only the first replicas are made, because all others do the same.

After `turn` replicas, the work of replicas repeats, with peers further on. So a task of replica c stands for those of
c + turn, c + 2 turn and so on: they are alike up to the peers, and what they need is alike, too. Where nothing tells
them apart (`stand_for_others`), they start and end at the same moments.

For example, three replicas of a stage put a piece for each other (0, 1) and get one each (2, 3); they turn by 1. Made
are the tasks of replica 0; its get from replica 2, which is two places further, needs what replica 2 puts, for which
the put of replica 0 stands. Of all twelve tasks, the rows are these::

    graph    [put.r0.k0, put.r0.k1, get.r0.p2.k0, get.r0.p1.k1]     needs  [(), (), (0,), (1,)]
    tasks    put.r0.k0 … get.r0.p1.k1, put.r1.k0 … get.r1.p2.k1, put.r2.k0 … get.r2.p0.k1
    rows     [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import overload

import numpy as np

from funcpipe.core.cached import cached_property
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.simulator.compiled_graph import Array, GraphColumns, graph_columns
from funcpipe.scheduler.simulator.costs import Costs
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.tasks import GETS, ORDERS, RESOURCES, SIDE_BY_SIDE, Order, Task, source_of

LEAST_LATENCY_S = 1e-6
"""A request of at least so many seconds ends later than it begins, by any clock of a step."""


@dataclass(frozen=True)
class FoldedGraph:
    """The tasks of the first `turn` of `replicas`, by stage and replica, which stand for those of all replicas."""

    graph: Graph
    replicas: int
    turn: int

    @staticmethod
    def of(shape: StepShape) -> "FoldedGraph":
        """Return the graph of a step."""
        return FoldedGraph(build_graph(shape, turn=shape.turn), shape.replicas, shape.turn)

    @property
    def mirrors(self) -> int:
        """The number of tasks that each task stands for."""
        return self.replicas // self.turn

    @cached_property
    def columns(self) -> GraphColumns:
        """The tasks that are made."""
        return graph_columns(self.graph, self.replicas)

    @cached_property
    def writers(self) -> Array:
        """For each task that is made, the stage whose object it puts or gets, and by how many places that replica is
        further on; its own stage and 0 for other tasks.
        """
        puts = [source_of(task) if task.kind in GETS else task for task in self.graph.tasks]
        places = [
            (put.replica - task.replica) % self.replicas for put, task in zip(puts, self.graph.tasks, strict=True)
        ]
        return np.array([[put.stage for put in puts], places], np.int64)

    @property
    def tasks(self) -> "FoldedTasks":
        """All tasks, in the order of `build_graph`."""
        return FoldedTasks(self)

    @cached_property
    def firsts(self) -> Array:
        """The first task that is made of each stage and replica: rows for stages; behind the last, their number."""
        worker = self.columns.stages * self.turn + self.columns.replicas
        return np.flatnonzero(np.diff(worker, prepend=-1, append=-1))

    @cached_property
    def starts(self) -> Array:
        """The first of all tasks of each worker; behind the last, their number."""
        lengths = np.diff(self.firsts).reshape(-1, self.turn)
        return np.concatenate([[0], np.cumsum(np.tile(lengths, self.mirrors))])

    @property
    def rows(self) -> Array:
        """For each task, the one that is made and stands for it."""
        firsts = np.tile(self.firsts[:-1].reshape(-1, self.turn), self.mirrors).ravel()
        return np.arange(self.starts[-1]) + np.repeat(firsts - self.starts[:-1], np.diff(self.starts))

    def all_columns(self) -> GraphColumns:
        """Return all tasks, and what they need."""
        return self._of_all(self.columns)

    def joined_columns(self) -> GraphColumns:
        """Return all tasks, and what they need, with a join for what several of a worker need alike."""
        gets, count = frozenset(self._gets), len(self.graph.tasks)
        local = [needs[:-1] if i in gets else needs for i, needs in enumerate(self.graph.needs)]
        often = Counter(needs for needs in local if len(needs) > 1)
        joins = {needs: count + j for j, needs in enumerate(needs for needs, times in often.items() if times > 1)}
        needs = [
            (joins[own], *every[len(own) :]) if own in joins else every
            for own, every in zip(local, self.graph.needs, strict=True)
        ]
        needs += joins
        targets = np.repeat(np.arange(len(needs)), [len(each) for each in needs])
        return self._of_all(replace(self.columns, sources=np.array(list(chain(*needs)), np.int64), targets=targets))

    def _of_all(self, made: GraphColumns) -> GraphColumns:
        """Return `made` for all replicas; each join comes once for each that it is made for."""
        tasks, rows = len(made.kinds), self.rows
        workers = np.arange(len(self.starts) - 1) % self.replicas
        own = np.bincount(made.targets, minlength=tasks)
        begins = np.cumsum(own) - own
        joins = np.arange(tasks, len(own))
        examples = made.sources[begins[joins]]
        stages, replicas = (np.append(each, each[examples]) for each in (made.stages, made.replicas))
        mirrors = self.turn * np.arange(self.mirrors)
        replica = np.append(np.repeat(workers, np.diff(self.starts)), (replicas[joins][:, None] + mirrors).ravel())
        items = np.append(rows, np.repeat(joins, self.mirrors))
        lengths = own[items]
        targets = np.repeat(np.arange(len(items)), lengths)
        needs = np.arange(len(targets)) + np.repeat(begins[items] - (np.cumsum(lengths) - lengths), lengths)
        places = np.zeros(len(made.sources), np.int64)
        gets = np.array(self._gets, np.int64)
        places[np.cumsum(own)[gets] - 1] = self.writers[1, gets]
        sources = made.sources[needs]
        writer = (replica[targets] + places[needs]) % self.replicas
        begin = self.firsts[stages[sources] * self.turn + replicas[sources]]
        position = self.starts[stages[sources] * self.replicas + writer] + sources - begin
        if len(joins):
            join = len(rows) + (sources - tasks) * self.mirrors + writer // self.turn
            position = np.where(sources < tasks, position, join)
        return GraphColumns(
            kinds=made.kinds[rows],
            stages=made.stages[rows],
            replicas=replica[: len(rows)],
            sources=position,
            targets=targets,
            of_replicas=self.replicas,
        )

    @property
    def _gets(self) -> list[int]:
        return [position for position, task in enumerate(self.graph.tasks) if task.kind in GETS]


class FoldedTasks(Sequence[Task]):
    """All tasks of a folded graph, each made when it is asked for."""

    def __init__(self, folded: FoldedGraph) -> None:
        self._folded = folded

    def __len__(self) -> int:
        return int(self._folded.starts[-1])

    @overload
    def __getitem__(self, position: int) -> Task: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[Task]: ...

    def __getitem__(self, position: int | slice) -> Task | Sequence[Task]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        folded, position = self._folded, range(len(self))[position]
        worker = int(np.searchsorted(folded.starts, position, side="right")) - 1
        stage, replica = divmod(worker, folded.replicas)
        first = folded.firsts[stage * folded.turn + replica % folded.turn]
        return self._turned(folded.graph.tasks[first + position - folded.starts[worker]], replica)

    def __iter__(self) -> Iterator[Task]:
        folded, firsts = self._folded, self._folded.firsts.tolist()
        for worker in range(len(folded.starts) - 1):
            stage, replica = divmod(worker, folded.replicas)
            made = stage * folded.turn + replica % folded.turn
            for task in folded.graph.tasks[firsts[made] : firsts[made + 1]]:
                yield self._turned(task, replica)

    def _turned(self, task: Task, replica: int) -> Task:
        """Return the task of `replica` for which `task` stands."""
        places, replicas = replica - task.replica, self._folded.replicas
        if not places:
            return task
        own, peer = task.micro_batch, task.peer
        return task._replace(
            replica=replica,
            micro_batch=None if own is None else own + places,
            peer=(peer + places) % replicas if peer is not None and task.kind in SIDE_BY_SIDE else peer,
        )


def stand_for_others(folded: FoldedGraph, costs: Costs, disturbances: Disturbances) -> bool:
    """Return True if the replicas that are made start and end all tasks when the others do, unless requests wait.

    It takes that nothing is drawn for each replica by itself, and that it makes no difference which of several
    replicas, of which all do the same at the same moment, is served first. It makes none, unless a task that needs an
    object of another replica takes its lane at once: those that ask for it side by side, in order, and then wait for
    their latency, begin behind everything of that moment.
    """
    if not disturbances.even or costs.poll_s.any():
        return False
    for position in np.flatnonzero(folded.writers[1]):
        kind = folded.graph.tasks[position].kind
        asks = kind in SIDE_BY_SIDE and ORDERS[RESOURCES[kind]] is Order.ASKED
        if not asks or costs.seconds[position] < LEAST_LATENCY_S:
            return False
    return True
