"""A worker's part of a step: its tasks, and which workers read and write the messages that concern it.

From that follows which messages it may delete. A message has certainly been read once its writer has finished a later
step in which it depended on every reader, directly or through others. A reader that dies may read it again, until the
checkpoint that it would restart from covers the message: a checkpoint after k steps covers what was written in steps
0 … k - 1. So may the writer itself, which repeats steps with what it has written.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from funcpipe.core import CountsByKind, RequestCounts, Routes, WorkerId, WorkerSpec
from funcpipe.core.stores import kind_moved
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.late import LatePart
from funcpipe.scheduler.pipeline import Loading
from funcpipe.scheduler.tasks import Task
from funcpipe.training.batches import Batches
from funcpipe.training.local_steps import Meetings


@dataclass(frozen=True)
class StepMessages:
    """The messages that a worker puts in a step: the `readers` of each key.

    `upstream` are the workers that the writer's own tasks of the step depend on. No worker puts more than `most`
    messages in the step.
    """

    readers: Mapping[str, frozenset[WorkerId]]
    upstream: frozenset[WorkerId]
    most: int = 0


@dataclass(frozen=True)
class _Message:
    step: int
    key: str
    readers: frozenset[WorkerId]


class MessageGC:
    """The messages that `writer`, or an earlier attempt of it, has put and not deleted yet."""

    def __init__(self, writer: WorkerId) -> None:
        self._writer = writer
        self._unread: list[_Message] = []
        self._read: list[_Message] = []
        self._lock = threading.Lock()  # messages are collected in the background while the next step ends

    def add_step(self, step: int, messages: StepMessages) -> None:
        """Record that the worker has finished `step`."""
        with self._lock:
            self._read += [message for message in self._unread if message.readers <= messages.upstream]
            self._unread = [message for message in self._unread if not message.readers <= messages.upstream]
            self._unread += [_Message(step, key, readers) for key, readers in messages.readers.items()]

    def keeps_before(self, step: int) -> bool:
        """Return True if messages of steps before `step` are still to be deleted."""
        with self._lock:
            return any(message.step < step for message in self._read)

    def collect(self, restart_step: Callable[[WorkerId], int]) -> list[str]:
        """Return the keys to delete, by the step at which each worker would restart; they are not returned again."""
        with self._lock:
            kept = [
                m for m in self._read if any(restart_step(reader) <= m.step for reader in m.readers | {self._writer})
            ]
            keys = {message.key for message in self._read} - {message.key for message in kept}
            self._read = kept
        return sorted(keys)


def most_objects(graph: Graph) -> int:
    """Return the largest number of objects that a worker of `graph` puts."""
    return max(Counter((put.stage, put.replica) for put in graph.readers()).values(), default=0)


def readers_of(graph: Graph, worker: WorkerId) -> dict[Task, frozenset[WorkerId]]:
    """Return the workers that read the object of each put of `worker`."""
    return {
        put: frozenset((get.stage, get.replica) for get in gets)
        for put, gets in graph.readers().items()
        if (put.stage, put.replica) == worker
    }


def upstream_of(graph: Graph, worker: WorkerId) -> frozenset[WorkerId]:
    """Return the workers with a task that must come before some task of `worker`."""
    seen = [(task.stage, task.replica) == worker for task in graph.tasks]
    stack = [position for position, own in enumerate(seen) if own]
    found = set()
    while stack:
        for need in graph.needs[stack.pop()]:
            if not seen[need]:
                seen[need] = True
                stack.append(need)
                found.add((graph.tasks[need].stage, graph.tasks[need].replica))
    return frozenset(found)


@dataclass(frozen=True)
class _StepGraph:
    """A worker's own tasks; the workers that read each object it puts; the workers that must act before it ends.

    `most_objects` is how many objects any one worker puts. `own` and `others` are the requests for messages that this
    worker, and that all others, make.
    """

    graph: Graph
    readers: Mapping[Task, frozenset[WorkerId]]
    upstream: frozenset[WorkerId]
    most_objects: int
    own: CountsByKind
    others: CountsByKind


class StepGraphs:
    """The graphs of one worker's steps. A graph depends only on the number of micro-batches, and on what replicas meet
    on, so few are made.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        keys: Keys,
        routes: Routes,
        batches: Batches,
        *,
        norms: bool,
        loads: bool,
        meetings: Meetings | None = None,
    ) -> None:
        """With `norms`, stages exchange the norms of their gradients in every step. With `loads`, this stage loads
        data; what other stages load or copy to accelerators does not concern it. Between `meetings`, if given, replicas
        train alone.
        """
        self._spec = spec
        self._keys = keys
        self._routes = routes
        self._batches = batches
        self._norms = norms
        self._loads = loads
        self._meetings = meetings
        self._steps = spec.epochs * batches.steps_per_epoch
        self._made: dict[tuple[int, Loading | None, tuple[int, ...], LatePart | None], _StepGraph] = {}

    def of_step(self, step: int, *, is_loaded: bool = True, goes_on: bool = True) -> _StepGraph:
        """Return the worker's part of `step`; unless `is_loaded`, nothing of the step was loaded in the step before.

        Unless it `goes_on`, a meeting that is late begins anew, with all that should have gone on before.
        """
        micro_batches = self._batches.micro_batches_of(step)
        following = self._batches.micro_batches_of(step + 1) if step + 1 < self._steps else 0
        stages = frozenset({self._spec.stage})
        loading = Loading(stages=stages, following=following, is_loaded=is_loaded) if self._loads else None
        fragments = () if self._meetings is None else self._meetings.fragments_after(step)
        kind = micro_batches, loading, fragments, self._late(step, goes_on=goes_on)
        if kind not in self._made:
            self._made[kind] = self._make(*kind)
        return self._made[kind]

    def _late(self, step: int, *, goes_on: bool) -> LatePart | None:
        """Return the part of a late meeting that goes on beside `step`, or all of it until then."""
        late = None if self._meetings is None else self._meetings.late(step)
        if late is None:
            return None
        place = step - late.measured - 1
        return LatePart(late.fragment, late.taken - late.measured, place if goes_on else 0, place)

    def messages_of(self, step: int) -> StepMessages:
        """Return the messages that the worker puts in `step`; those of a late meeting count in its last step."""
        part, late = self.of_step(step), None if self._meetings is None else self._meetings.late(step)
        ends_late = late is not None and late.taken == step
        puts = self.of_step(step, goes_on=False).readers if ends_late else part.readers
        own = {put: by for put, by in puts.items() if put.delay is None or ends_late}
        keys = {self._keys.message(self._spec.worker, step, str(put)): by for put, by in own.items()}
        return StepMessages(readers=keys, upstream=part.upstream, most=part.most_objects)

    def _make(
        self, micro_batches: int, loading: Loading | None, fragments: tuple[int, ...], late: LatePart | None
    ) -> _StepGraph:
        plan, worker = self._spec.plan, (self._spec.stage, self._spec.replica)
        graph = build_graph(
            StepShape(
                stages=len(plan.stages),
                replicas=plan.replicas,
                micro_batches=micro_batches,
                routes=self._routes,
                schedule=plan.schedule,
                sync=plan.sync,
                norms=self._norms,
                streams=plan.streams,
                ways=plan.ways,
                joint_loss=plan.joint_loss,
                loading=loading,
                alone=self._meetings is not None,
                meets=bool(fragments),
                fragments=fragments if plan.sync_fragments > 1 else (),
                late=late,
                accelerated=self._spec.accelerated,
            )
        )
        return _StepGraph(
            graph=graph.of_worker(*worker),
            readers=readers_of(graph, worker),
            upstream=upstream_of(graph, worker),
            most_objects=most_objects(graph),
            own=message_counts(task for task in graph.tasks if (task.stage, task.replica) == worker),
            others=message_counts(task for task in graph.tasks if (task.stage, task.replica) != worker),
        )


def message_counts(tasks: Iterable[Task]) -> CountsByKind:
    """Return the requests for messages that `tasks` make if each finds its object at once, without their bytes."""
    counts = CountsByKind().by_kind
    for kind, count in Counter(task.kind for task in tasks).items():
        if kind.is_put or kind.is_get:
            counts[kind_moved(kind.value)] += RequestCounts(puts=count * kind.is_put, gets=count * kind.is_get)
    return CountsByKind(**counts)
