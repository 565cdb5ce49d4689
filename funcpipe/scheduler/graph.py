"""The task graph of one training step: computation, transfers between stages, synchronisation of replicas, update.

The graph fixes what waits for what, and for each lane the order in which it takes its tasks. Nothing else: overlap
follows from the dependencies that are not there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from funcpipe.comm.scatter_reduce import Move, Pattern, pattern, transfers
from funcpipe.core import ActivationRoute, Routes, ScheduleKind, Streams, Sync, TieRoute
from funcpipe.scheduler.schedules import Action, actions
from funcpipe.scheduler.tasks import Kind, Lane, Task, source_of


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks in an order in which each lane takes its own, and for each task the tasks it needs, by position."""

    tasks: tuple[Task, ...]
    needs: tuple[tuple[int, ...], ...]

    def lanes(self) -> Mapping[Lane, Sequence[int]]:
        """For each lane the positions of its tasks, in the order in which it takes them."""
        found: dict[Lane, list[int]] = defaultdict(list)
        for position, task in enumerate(self.tasks):
            found[task.lane].append(position)
        return found

    def of_worker(self, stage: int, replica: int) -> "Graph":
        """The tasks of one worker and their dependencies on each other; what comes from others, storage brings."""
        kept = [i for i, task in enumerate(self.tasks) if (task.stage, task.replica) == (stage, replica)]
        place = {position: new for new, position in enumerate(kept)}
        needs = (tuple(place[need] for need in self.needs[position] if need in place) for position in kept)
        return Graph(tuple(self.tasks[position] for position in kept), tuple(needs))

    def readers(self) -> Mapping[Task, tuple[Task, ...]]:
        """For each put the gets that read its object."""
        found: dict[Task, list[Task]] = defaultdict(list)
        for task in self.tasks:
            if task.kind.is_get:
                found[source_of(task)].append(task)
        return {put: tuple(gets) for put, gets in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the graph of a step depends on. `micro_batches` counts those of all replicas in this step.

    `streams` cuts the synchronisation; None stands for the usual cut.
    """

    stages: int
    replicas: int
    micro_batches: int
    routes: Routes
    schedule: ScheduleKind
    sync: Sync
    streams: Streams | None = None

    @property
    def pattern(self) -> Pattern:
        """How the replicas of each stage sum their gradients."""
        return pattern(self.sync, self.replicas, self.streams)


def build_graph(shape: StepShape) -> Graph:
    """The tasks of one step of all workers; micro-batch m belongs to replica m mod `replicas`."""
    tasks: list[Task] = []
    local_needs: list[tuple[Task, ...]] = []
    for stage in range(shape.stages):
        for replica in range(shape.replicas):
            for task, waits_for in _worker_tasks(shape, stage, replica):
                tasks.append(task)
                local_needs.append(waits_for)
    place = {task: position for position, task in enumerate(tasks)}
    needs: list[tuple[int, ...]] = []
    for task, local in zip(tasks, local_needs, strict=True):
        remote = (source_of(task),) if task.kind.is_get else ()
        needs.append(tuple(place[need] for need in (*local, *remote)))
    return Graph(tuple(tasks), tuple(needs))


_Tasks = Iterator[tuple[Task, tuple[Task, ...]]]


def _worker_tasks(shape: StepShape, stage: int, replica: int) -> _Tasks:
    order = actions(shape.schedule, range(replica, shape.micro_batches, shape.replicas))
    done: list[Task] = []
    for action in order:
        for task, needs in (_backward if action.backward else _forward)(shape, stage, replica, action):
            done.append(task)
            yield task, needs
    gradients = tuple(task for task in done if task.kind is Kind.BACKWARD)[-1:]
    for task, needs in _add_tied(shape, stage, replica, gradients):
        gradients = (task,) if task.kind is Kind.ADD_TIED else gradients
        done.append(task)
        yield task, needs
    if shape.replicas > 1:
        for task, needs in _synchronise(shape, stage, replica, gradients):
            gradients = (*gradients, task)
            done.append(task)
            yield task, needs
    for task, needs in _share_tied(shape, stage, replica, gradients):
        done.append(task)
        yield task, needs
    yield Task(Kind.UPDATE, stage, replica), tuple(done)


def _forward(shape: StepShape, stage: int, replica: int, action: Action) -> _Tasks:
    """Receive what earlier stages made → forward → send what later stages need."""
    m = action.micro_batch
    gets = []
    for route, part in _numbered(shape.routes):
        if stage in route.consumers:
            gets.append(Task(Kind.GET_ACTIVATION, stage, replica, micro_batch=m, peer=route.producer, part=part))
            yield gets[-1], ()
    forward = Task(Kind.FORWARD, stage, replica, micro_batch=m)
    yield forward, tuple(gets)
    for put in _sends(shape, stage, replica, m):
        yield put, (forward,)


def _sends(shape: StepShape, stage: int, replica: int, micro_batch: int) -> tuple[Task, ...]:
    return tuple(
        Task(Kind.PUT_ACTIVATION, stage, replica, micro_batch=micro_batch, part=part)
        for route, part in _numbered(shape.routes)
        if route.producer == stage
    )


def _backward(shape: StepShape, stage: int, replica: int, action: Action) -> _Tasks:
    """Receive the gradients of what was sent → backward, which frees it → send the gradients of what was received."""
    m = action.micro_batch
    gets = []
    for route in shape.routes.gradients:
        if route.producer == stage:
            gets.append(Task(Kind.GET_GRADIENT, stage, replica, micro_batch=m, peer=route.consumer))
            yield gets[-1], ()
    backward = Task(Kind.BACKWARD, stage, replica, micro_batch=m)
    yield backward, (Task(Kind.FORWARD, stage, replica, micro_batch=m), *_sends(shape, stage, replica, m), *gets)
    for route in shape.routes.gradients:
        if route.consumer == stage:
            yield Task(Kind.PUT_GRADIENT, stage, replica, micro_batch=m, peer=route.producer), (backward,)


def _add_tied(shape: StepShape, stage: int, replica: int, gradients: tuple[Task, ...]) -> _Tasks:
    """Receive what the later holders of tied parameters have added up → add the own gradients → pass them on."""
    held = [(route.stages, route.stages.index(stage), part) for part, route in _held_ties(shape, stage)]
    gets = [
        Task(Kind.GET_TIED, stage, replica, peer=stages[place + 1], part=part)
        for stages, place, part in held
        if place + 1 < len(stages)
    ]
    for get in gets:
        yield get, ()
    if gets:
        add = Task(Kind.ADD_TIED, stage, replica)
        yield add, (*gradients, *gets)
        gradients = (add,)
    for stages, place, part in held:
        if place > 0:
            yield Task(Kind.PUT_TIED, stage, replica, peer=stages[place - 1], part=part), gradients


def _share_tied(shape: StepShape, stage: int, replica: int, summed: tuple[Task, ...]) -> _Tasks:
    """The first holder's sum over stages and replicas → to the other holders."""
    for part, route in _held_ties(shape, stage):
        if stage == route.stages[0]:
            yield Task(Kind.PUT_TIED_SUM, stage, replica, part=part), summed
        else:
            yield Task(Kind.GET_TIED_SUM, stage, replica, peer=route.stages[0], part=part), ()


def _held_ties(shape: StepShape, stage: int) -> list[tuple[int, TieRoute]]:
    return [(part, route) for part, route in enumerate(shape.routes.ties) if stage in route.stages]


_KIND_OF_MOVE = {
    Move.PUT_SPLIT: Kind.PUT_SPLIT,
    Move.GET_SPLIT: Kind.GET_SPLIT,
    Move.MERGE: Kind.MERGE,
    Move.PUT_MERGED: Kind.PUT_MERGED,
    Move.GET_MERGED: Kind.GET_MERGED,
}


def _synchronise(shape: StepShape, stage: int, replica: int, gradients: tuple[Task, ...]) -> _Tasks:
    """The stage's gradients → sum the replicas' gradients. A replica without micro-batches adds nothing."""
    flatten = Task(Kind.FLATTEN, stage, replica)
    yield flatten, gradients
    moves: list[Task] = []
    for transfer in transfers(shape.pattern, replica):
        moves.append(Task(_KIND_OF_MOVE[transfer.move], stage, replica, peer=transfer.peer, part=transfer.part))
        yield moves[-1], (flatten, *(moves[position] for position in transfer.after))


def _numbered(routes: Routes) -> Iterator[tuple[ActivationRoute, int]]:
    """The activation routes, each with its number among those of the same producer."""
    count: dict[int, int] = defaultdict(int)
    for route in routes.activations:
        yield route, count[route.producer]
        count[route.producer] += 1
