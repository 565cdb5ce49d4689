"""The task graph of one training step: computation, transfers between stages, synchronisation of replicas, update.

The graph says what waits for what, and in which order each lane takes its tasks (`tasks.Order`); nothing else. Tasks
overlap wherever no dependency forbids it. `forward_graph` is the graph of a batch that is only evaluated.

Where replicas train alone, they sum nothing in a step, and each updates by itself. In the step in which they meet, what
they sum comes after that update:

    backward ... norm | local-update | flatten ... get-merged | update

A meeting whose sums are taken `delay` steps late goes on beside these steps: each has a part of its transfers, spread
over its computations.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from funcpipe.comm.collectives import pattern, transfers
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import Resource, Routes, ScheduleKind, Streams, Sync, SyncWay, TieRoute
from funcpipe.scheduler.late import KIND_OF_MOVE, LatePart, late_tasks, with_late
from funcpipe.scheduler.pipeline import (
    RECEIVES,
    Links,
    Loading,
    Pipeline,
    Tasks,
    find_links,
    stage_loads,
    with_copies,
    with_loads,
)
from funcpipe.scheduler.tasks import GETS, PUTS, RESOURCES, Kind, Lane, Task, source_of


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks, in an order that gives the order of every lane; and for each task the positions of the tasks it needs."""

    tasks: tuple[Task, ...]
    needs: tuple[tuple[int, ...], ...]

    def lanes(self) -> Mapping[Lane, Sequence[int]]:
        """Return the positions of each lane's tasks, in order."""
        found: dict[tuple[int, int, Resource], list[int]] = defaultdict(list)
        for position, task in enumerate(self.tasks):
            found[task[1], task[2], RESOURCES[task[0]]].append(position)
        return {Lane(*lane): positions for lane, positions in found.items()}

    def of_worker(self, stage: int, replica: int) -> "Graph":
        """Return the tasks of one worker and their dependencies on each other; it meets the others in storage only."""
        kept = [i for i, task in enumerate(self.tasks) if (task.stage, task.replica) == (stage, replica)]
        place = {position: new for new, position in enumerate(kept)}
        needs = (tuple(place[need] for need in self.needs[position] if need in place) for position in kept)
        return Graph(tuple(self.tasks[position] for position in kept), tuple(needs))

    def readers(self) -> Mapping[Task, tuple[Task, ...]]:
        """Return the gets that read each put's object."""
        found: dict[Task, list[Task]] = defaultdict(list)
        for task in self.tasks:
            if task.kind.is_get:
                found[source_of(task)].append(task)
        return {put: tuple(gets) for put, gets in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The shape of the graph of a step. `micro_batches` counts those of all replicas in this step.

    With `norms`, all stages exchange the norms of their gradients before they update. `streams` says how to cut the
    synchronisation; None means the usual cut. Where `ways` are given, they are those of the stages. `loading` says what
    is loaded; None means nothing. With `joint_loss`, which takes GPipe's schedule, the last stage computes the loss of
    all micro-batches at once, before their backwards. Where replicas train `alone`, they sum what training has changed
    if they meet after this step, and nothing otherwise; where parameters are in several fragments, of those in
    `fragments`. `late` is what goes on beside the step of a meeting that began before. The stages in `accelerated` are
    on accelerators, so their messages cross between device and host.
    """

    stages: int
    replicas: int
    micro_batches: int
    routes: Routes
    schedule: ScheduleKind
    sync: Sync
    norms: bool = False
    streams: Streams | None = None
    loading: Loading | None = None
    ways: tuple[SyncWay, ...] = ()
    joint_loss: bool = False
    alone: bool = False
    meets: bool = True
    fragments: tuple[int, ...] = ()
    late: LatePart | None = None
    accelerated: frozenset[int] = frozenset()

    @property
    def sums_gradients(self) -> bool:
        """True if the replicas sum gradients, which all of them update with."""
        return self.replicas > 1 and not self.alone

    @property
    def turn(self) -> int:
        """The number of replicas after which others do the same with peers further on (`Pattern.turn`)."""
        loaded = 0 if self.loading is None else self.loading.following
        if self.replicas == 1 or self.joint_loss or self.micro_batches % self.replicas or loaded % self.replicas:
            return self.replicas
        return math.lcm(*(self.pattern_of(stage).turn for stage in range(self.stages)))

    def pattern_of(self, stage: int) -> Pattern:
        """Return the pattern by which the replicas of a stage sum their gradients."""
        way = self.ways[stage] if self.ways else SyncWay(self.sync, self.streams)
        return pattern(way.sync, self.replicas, way.streams)


def build_graph(shape: StepShape, *, turn: int | None = None) -> Graph:
    """Return the tasks of one step of all workers; micro-batch m belongs to replica m mod `replicas`.

    Given the `turn` of the shape, only those of so many replicas. Each of them stands for others too: where a task
    needs one of replica r, it needs that of replica r mod `turn`. The last need of a get is the put of its object.
    """
    turn = turn or shape.replicas
    links = find_links(shape.routes, shape.stages)
    tasks: list[Task] = []
    needs: list[tuple[int, ...]] = []
    gets: list[int] = []
    puts: dict[Task, int] = {}
    for stage in range(shape.stages):
        for replica in range(turn):
            first, place = len(tasks), dict[Task, int]()
            asked = _Asked()
            own = _tasks_of(shape, links[stage], stage, replica)
            for task, local in with_copies(own) if stage in shape.accelerated else own:
                place[task] = position = len(tasks)
                if task.kind in GETS:
                    gets.append(position)
                    local = asked.after(task, local, place)
                elif task.kind in PUTS:
                    puts[task] = position
                tasks.append(task)
                needs.append(tuple([place[need] for need in local]))
            needed = set().union(*needs[first:])
            needs.append(tuple(position for position in range(first, len(tasks)) if position not in needed))
            tasks.append(Task(Kind.UPDATE, stage, replica))
    for position in gets:
        put = source_of(tasks[position])
        if put.replica >= turn:
            put = put._replace(replica=put.replica % turn)
        needs[position] += (puts[put],)
    return Graph(tuple(tasks), tuple(needs))


class _Asked:
    """Makes a worker ask for objects in order: each get needs what the gets before it need (see `Order`).

    Receives of a pipeline do so by themselves. To other gets is added what does not follow from their own needs: all of
    it follows if the get before is one of them, and a computation follows from a later one.
    """

    def __init__(self) -> None:
        self._needs: tuple[Task, ...] = ()
        self._last: Task | None = None

    def after(self, get: Task, local: tuple[Task, ...], place: Mapping[Task, int]) -> tuple[Task, ...]:
        """Return the tasks that `get`, which comes next, needs of its own worker, if by itself it needs `local`."""
        if get.kind not in RECEIVES and self._last not in local and self._needs != local:
            computed = max([place[need] for need in local if RESOURCES[need.kind] is Resource.COMPUTE], default=-1)
            local += tuple(
                need
                for need in self._needs
                if need not in local and not (RESOURCES[need.kind] is Resource.COMPUTE and place[need] <= computed)
            )
        self._last, self._needs = get, local
        return local


def _tasks_of(shape: StepShape, links: Links, stage: int, replica: int) -> Tasks:
    """Yield everything that one worker does before its last update."""
    own = _worker_tasks(shape, links, stage, replica)
    if shape.late is not None and shape.alone and shape.replicas > 1:
        own = with_late(own, _late_tasks(shape, shape.late, stage, replica))
    if not (shape.alone and shape.meets and shape.replicas > 1):
        yield from own
        return
    last: dict[Task, None] = {}
    for task, needs in own:
        if task.kind is not Kind.LOAD:
            last[task] = None
        for need in needs:
            last.pop(need, None)
        yield task, needs
    yield from _meet(shape, stage, replica, tuple(last))


def _worker_tasks(shape: StepShape, links: Links, stage: int, replica: int) -> Tasks:
    """Yield everything that one worker does for the step's gradients."""
    mine = range(replica, shape.micro_batches, shape.replicas)
    gradients: tuple[Task, ...] = ()
    buckets, partners = _buckets(shape, links, stage), _partners(shape, stage, replica)
    pipeline = Pipeline(links, shape.schedule, stage, shape.stages, replica, mine, buckets, partners)
    loads = stage_loads(
        shape.loading,
        shape.schedule,
        stage=stage,
        stages=shape.stages,
        replica=replica,
        replicas=shape.replicas,
        mine=mine,
    )
    for task, needs in with_loads(pipeline.tasks(), loads):
        gradients = (task,) if task.kind is Kind.BACKWARD else gradients
        yield task, needs
    for task, needs in _add_tied(shape, stage, replica, gradients):
        gradients = (task,) if task.kind is Kind.ADD_TIED else gradients
        yield task, needs
    if shape.sums_gradients:
        for task, needs in _synchronise(shape, stage, replica, gradients, pipeline.last_buckets()):
            gradients = (*gradients, task)
            yield task, needs
    yield from _share_tied(shape, stage, replica, gradients)
    if shape.norms:
        yield from _share_norms(shape, stage, replica, gradients)


def _meet(shape: StepShape, stage: int, replica: int, before: Sequence[Task]) -> Tasks:
    """Update alone once all `before` has ended → sum what training has changed since the replicas met last.

    The first holder of tied parameters, which are in the first fragment, sums them for the other holders too.
    """
    updated = Task(Kind.LOCAL_UPDATE, stage, replica)
    yield updated, tuple(before)
    summed: tuple[Task, ...] = ()
    for fragment in shape.fragments or (None,):
        for task, needs in _synchronise(shape, stage, replica, (updated,), (), fragment):
            summed = (*summed, task) if not fragment else summed
            yield task, needs
    if not summed:
        return
    for task, needs in _share_tied(shape, stage, replica, summed):
        assert task.part is not None, "routes of tied parameters are numbered"
        yield task._replace(part=len(shape.routes.ties) + task.part), needs or (summed[0],)


def _late_tasks(shape: StepShape, late: LatePart, stage: int, replica: int) -> Tasks:
    """Yield what one worker does beside the step for a meeting that is late."""
    moved: list[Task] = []
    for task, needs in late_tasks(late, shape.pattern_of(stage), stage, replica):
        moved.append(task)
        yield task, needs
    begun = tuple(task for task in moved if task.kind is Kind.FLATTEN)
    for task, needs in _share_tied(shape, stage, replica, tuple(moved)) if late.ends_with_tied else ():
        assert task.part is not None, "routes of tied parameters are numbered"
        part = len(shape.routes.ties) + task.part
        yield task._replace(part=part, fragment=late.fragment, delay=late.delay), needs or begun


def _partners(shape: StepShape, stage: int, replica: int) -> tuple[int, ...] | None:
    """The other replicas with micro-batches, of a stage that computes the loss of all; None of any other stage."""
    if not shape.joint_loss or stage < shape.stages - 1:
        return None
    return tuple(other for other in range(min(shape.replicas, shape.micro_batches)) if other != replica)


def _buckets(shape: StepShape, links: Links, stage: int) -> int:
    """Return the number of parts of the gradient that may be summed before the last backward has ended.

    None where it has gradients of activations to send: those of other stages wait for them, and would wait for the
    parts as well, at one stage after the other. None either where gradients of tied parameters are still to be added.
    """
    if not shape.sums_gradients or links.gradient_writes or _adds_tied(shape, stage):
        return 0
    return shape.pattern_of(stage).streams.rounds - 1


def _add_tied(shape: StepShape, stage: int, replica: int, gradients: tuple[Task, ...]) -> Tasks:
    """Receive the sums of the later holders of tied parameters → add this stage's gradients → pass the sums on."""
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


def _share_tied(shape: StepShape, stage: int, replica: int, summed: tuple[Task, ...]) -> Tasks:
    """Yield the first holder's sum over stages and replicas → to the other holders."""
    for part, route in _held_ties(shape, stage):
        if stage == route.stages[0]:
            yield Task(Kind.PUT_TIED_SUM, stage, replica, part=part), summed
        else:
            yield Task(Kind.GET_TIED_SUM, stage, replica, peer=route.stages[0], part=part), ()


def _share_norms(shape: StepShape, stage: int, replica: int, summed: tuple[Task, ...]) -> Tasks:
    """Send the norm of this stage's gradients to the same replica of all other stages, and receive theirs."""
    norm = Task(Kind.NORM, stage, replica)
    yield norm, summed
    if shape.stages > 1:
        yield Task(Kind.PUT_NORM, stage, replica), (norm,)
    for other in range(shape.stages):
        if other != stage:
            yield Task(Kind.GET_NORM, stage, replica, peer=other), ()


def _adds_tied(shape: StepShape, stage: int) -> bool:
    """Return True if this stage adds gradients of tied parameters that later stages hold."""
    return any(stage != route.stages[-1] for _, route in _held_ties(shape, stage))


def _held_ties(shape: StepShape, stage: int) -> list[tuple[int, TieRoute]]:
    return [(part, route) for part, route in enumerate(shape.routes.ties) if stage in route.stages]


def _synchronise(
    shape: StepShape,
    stage: int,
    replica: int,
    gradients: tuple[Task, ...],
    buckets: tuple[Task, ...],
    fragment: int | None = None,
) -> Tasks:
    """Sum the gradients of a stage's replicas; a replica without micro-batches adds nothing.

    A round may begin once its bucket of gradients is complete; without buckets, once all gradients are.
    """
    flatten = Task(Kind.FLATTEN, stage, replica, fragment=fragment)
    yield flatten, gradients
    released = dict(enumerate(buckets))
    moves: list[Task] = []
    chosen = shape.pattern_of(stage)
    for transfer in transfers(chosen, replica):
        kind = KIND_OF_MOVE[transfer.move]
        moves.append(Task(kind, stage, replica, peer=transfer.peer, part=transfer.part, fragment=fragment))
        own = released.get(chosen.round_of(transfer), flatten)
        yield moves[-1], (own, *(moves[position] for position in transfer.after))


AHEAD = 2
"""The number of micro-batches that a stage may have received and not begun with."""


def forward_graph(
    *, stages: int, replicas: int, micro_batches: int, routes: Routes, accelerated: frozenset[int] = frozenset()
) -> Graph:
    """Return the tasks of all workers for so many micro-batches; micro-batch m belongs to replica m mod `replicas`.

    Messages of the stages in `accelerated` cross between device and host.
    """
    links = find_links(routes, stages)
    tasks: list[Task] = []
    needs: list[tuple[int, ...]] = []
    place: dict[Task, int] = {}
    for stage in range(stages):
        for replica in range(replicas):
            own = _forwards(links[stage], stage, replica, range(replica, micro_batches, replicas))
            for task, local in with_copies(own) if stage in accelerated else own:
                place[task] = len(tasks)
                tasks.append(task)
                needs.append(tuple(place[need] for need in local))
    for task, position in place.items():
        if task.kind is Kind.GET_ACTIVATION:
            needs[position] += (place[source_of(task)],)
    return Graph(tuple(tasks), tuple(needs))


def _forwards(links: Links, stage: int, replica: int, mine: range) -> Tasks:
    """Yield what one worker does with the micro-batches `mine` that are only evaluated."""
    done: list[Task] = []
    for m in mine:
        room = tuple(done[-AHEAD:][:1]) if len(done) >= AHEAD else ()
        gets = tuple(Task(Kind.GET_ACTIVATION, stage, replica, m, producer, part) for producer, part in links.reads)
        for get in gets:
            yield get, room
        done.append(Task(Kind.FORWARD, stage, replica, m))
        yield done[-1], gets
        for part in links.writes:
            yield Task(Kind.PUT_ACTIVATION, stage, replica, m, None, part), (done[-1],)
