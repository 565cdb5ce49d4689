"""The way of micro-batches through one stage: their order, the transfers around them, and loading ahead of them.

On an accelerator each message crosses once between its memory and the host's, on lanes of their own:

    get-activation → activation-to-device → forward → activation-to-host → put-activation

The order follows from how many micro-batches a stage may have in flight, with their forward begun and their backward
not ended. No stage has fewer in flight than the stages after it, so no order here can deadlock, whatever tensors skip
stages.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from funcpipe.core import Routes, ScheduleKind
from funcpipe.core.choices import OPEN_UPLOADS
from funcpipe.scheduler.tasks import Kind, Task, copy_of


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or the backward of one micro-batch; prints as `F3` or `B3`."""

    backward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro_batch}"


def in_flight(schedule: ScheduleKind, *, stage: int, stages: int, micro_batches: int) -> int:
    """Return the most micro-batches, of `micro_batches`, whose activations a function of `stage` holds at once."""
    to_the_end = stages - stage
    match schedule:
        case ScheduleKind.GPIPE:
            return micro_batches
        case ScheduleKind.ONE_F_ONE_B:
            return min(micro_batches, to_the_end)
        case ScheduleKind.EAGER_ONE_F_ONE_B:
            return min(micro_batches, 2 * to_the_end - 1)


def actions(
    schedule: ScheduleKind, micro_batches: Sequence[int], *, stage: int = 0, stages: int = 1
) -> tuple[Action, ...]:
    """Return the order of one stage's computation for `micro_batches`, given in ascending order."""
    if schedule is ScheduleKind.GPIPE:
        return _gpipe(micro_batches)
    held = in_flight(schedule, stage=stage, stages=stages, micro_batches=len(micro_batches))
    return _one_forward_one_backward(micro_batches, held)


def _gpipe(micro_batches: Sequence[int]) -> tuple[Action, ...]:
    """Return all forwards in ascending order, then all backwards in descending order (GPipe; FuncPipe section 3.1).

    ::

        stage 0   F0 F1 F2          B2 B1 B0
        stage 1      F0 F1 F2    B2 B1 B0
        stage 2         F0 F1 F2 B2 B1 B0
    """
    forwards = tuple(Action(False, m) for m in micro_batches)
    backwards = tuple(Action(True, m) for m in reversed(micro_batches))
    return forwards + backwards


def _one_forward_one_backward(micro_batches: Sequence[int], held: int) -> tuple[Action, ...]:
    """Return `held` forwards, then backwards and forwards by turns, then the other backwards; all in ascending order.

    With one micro-batch in flight for each stage to the end this is 1F1B (PipeDream-Flush, Narayanan et al., ICML
    2021); with 2 n - 1 for n stages to the end, eager 1F1B (Zhuang et al., MLSys 2023), which covers transfers that
    take as long between two stages as a stage computes.

    ::

        stage 0   F0 F1 F2       B0 F3 B1    B2    B3
        stage 1      F0 F1    B0 F2 B1 F3 B2    B3
        stage 2         F0 B0 F1 B1 F2 B2 F3 B3
    """
    order = [Action(False, m) for m in micro_batches[:held]]
    for place, m in enumerate(micro_batches):
        order.append(Action(True, m))
        order += [Action(False, later) for later in micro_batches[place + held : place + held + 1]]
    return tuple(order)


Tasks = Iterator[tuple[Task, tuple[Task, ...]]]
"""Tasks of one worker in order, each with the tasks of the same worker that it needs."""

RECEIVES = frozenset({Kind.GET_ACTIVATION, Kind.GET_GRADIENT})
"""Transfers into a stage; what one of them needs never ends before what those before it on their lane need."""

SENDS = frozenset({Kind.PUT_ACTIVATION, Kind.PUT_GRADIENT})
"""Transfers out of a stage."""

BUFFERS = 2
"""The gradients that may be on their way into or out of a stage: the one its backward is working on, and one more."""


@dataclass(frozen=True, slots=True)
class Links:
    """The objects that one stage reads and writes for each micro-batch.

    Forward: `reads` are objects (producer stage, part), `writes` the stage's own parts. Backward: `gradient_reads` are
    the stages that send gradients, `gradient_writes` those that receive them.
    """

    reads: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    gradient_reads: tuple[int, ...]
    gradient_writes: tuple[int, ...]


def find_links(routes: Routes, stages: int) -> tuple[Links, ...]:
    """Return the links of each stage. Parts number the activation routes of a producer."""
    reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    writes: dict[int, list[int]] = defaultdict(list)
    for part, route in routes.numbered_activations():
        writes[route.producer].append(part)
        for consumer in route.consumers:
            reads[consumer].append((route.producer, part))
    return tuple(
        Links(
            reads=tuple(reads[stage]),
            writes=tuple(writes[stage]),
            gradient_reads=tuple(route.consumer for route in routes.gradients if route.producer == stage),
            gradient_writes=tuple(route.producer for route in routes.gradients if route.consumer == stage),
        )
        for stage in range(stages)
    )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One replica of one of `stages` stages, which works on the micro-batches `mine`.

    Its last backward is cut into `buckets` tasks, each of which completes the gradients of one round, and the rest. If
    it has `partners`, it computes the loss of the whole batch between its forwards and its backwards, with the outputs
    of these replicas and its own.
    """

    links: Links
    schedule: ScheduleKind
    stage: int
    stages: int
    replica: int
    mine: range
    buckets: int = 0
    partners: tuple[int, ...] | None = None

    def tasks(self) -> Tasks:
        """Yield all forwards and backwards in the order of the schedule, with their transfers.

        Receives run ahead of the computation only as far as memory is reserved for them: one micro-batch more than the
        schedule has in flight, and `BUFFERS` gradients.
        """
        count = len(self.mine)
        held = in_flight(self.schedule, stage=self.stage, stages=self.stages, micro_batches=count)
        backwards: list[Task] = []
        forwards = 0
        for action in actions(self.schedule, self.mine, stage=self.stage, stages=self.stages):
            if action.backward:
                if self.partners is not None and not backwards:
                    yield from self._joint_loss(self.partners)
                yield from self._backward(action.micro_batch, backwards)
            else:
                room = forwards - held - 1
                yield from self._forward(action.micro_batch, tuple(backwards[room : room + 1]) if room >= 0 else ())
                forwards += 1

    def _forward(self, m: int, room: tuple[Task, ...]) -> Tasks:
        """Receive what earlier stages sent, once there is room → forward → send what later stages need."""
        gets = []
        for producer, part in self.links.reads:
            gets.append(Task(Kind.GET_ACTIVATION, self.stage, self.replica, m, producer, part))
            yield gets[-1], room
        forward = self._compute(Kind.FORWARD, m)
        yield forward, tuple(gets)
        for put in self._sends(m):
            yield put, (forward,)

    def _joint_loss(self, partners: tuple[int, ...]) -> Tasks:
        """Exchange outputs with the `partners` once all are there → the loss of all micro-batches.

        Nothing is asked for before, though others may be ahead: outputs of all are kept at once only for the loss.
        """
        last = self._compute(Kind.FORWARD, self.mine[-1])
        if partners:
            yield Task(Kind.PUT_OUTPUTS, self.stage, self.replica), (last,)
        gets = [Task(Kind.GET_OUTPUTS, self.stage, self.replica, peer=partner) for partner in partners]
        for get in gets:
            yield get, (last,)
        yield Task(Kind.JOINT_LOSS, self.stage, self.replica), (last, *gets)

    def _backward(self, m: int, before: list[Task]) -> Tasks:
        """Receive the gradients of what was sent → backward → send the gradients of what was received.

        `before` holds the backwards so far; this one is added to it.
        """
        room = tuple(before[-BUFFERS:][:1]) if len(before) >= BUFFERS else ()
        gets = []
        for consumer in self.links.gradient_reads:
            gets.append(Task(Kind.GET_GRADIENT, self.stage, self.replica, m, consumer))
            yield gets[-1], room
        sent = tuple(put for task in room for put in self._gradient_sends(task.micro_batch))
        joint = () if self.partners is None else (Task(Kind.JOINT_LOSS, self.stage, self.replica),)
        needs = (self._compute(Kind.FORWARD, m), *joint, *self._sends(m), *gets, *sent)
        backward = self._compute(Kind.BACKWARD, m)
        for bucket in self.last_buckets() if len(before) == len(self.mine) - 1 else ():
            yield bucket, needs
            needs = (self._compute(Kind.FORWARD, m), bucket)
            backward = backward._replace(part=self.buckets)
        yield backward, needs
        before.append(backward)
        for put in self._gradient_sends(m):
            yield put, (backward,)

    def last_buckets(self) -> tuple[Task, ...]:
        """Return the buckets of the last backward, without its rest."""
        if not self.mine:
            return ()
        last = list(actions(self.schedule, self.mine, stage=self.stage, stages=self.stages))[-1].micro_batch
        return tuple(Task(Kind.BUCKET, self.stage, self.replica, last, None, part) for part in range(self.buckets))

    def _compute(self, kind: Kind, m: int) -> Task:
        return Task(kind, self.stage, self.replica, m)

    def _sends(self, m: int) -> list[Task]:
        return [Task(Kind.PUT_ACTIVATION, self.stage, self.replica, m, None, part) for part in self.links.writes]

    def _gradient_sends(self, m: int | None) -> list[Task]:
        return [Task(Kind.PUT_GRADIENT, self.stage, self.replica, m, peer) for peer in self.links.gradient_writes]


SPARE = 2
"""The micro-batches that a lane may have loaded beyond those that are to be there when a step begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The loading in a step: by which `stages`, and for how many micro-batches in the `following` step.

    At the end of a step the first micro-batches of the next one are loaded: as many as the schedule has in flight, and
    one more. So loading has the whole step to hide behind computation, under GPipe too, whose forwards come all at
    once. From then on a micro-batch is loaded for each one that a forward has taken, and `SPARE` beyond these.

    By hand, for steps of 4 micro-batches under 1F1B with one in flight: 2 of the step were loaded before. Its own tasks
    are load.m2, load.m3, and for the next step load.m0.k1, load.m1.k1. The first two may start at once, the third needs
    forward.m0, the fourth forward.m1; forward.m2 needs load.m2.

    Unless `is_loaded`, nothing of the step itself was loaded before it.
    """

    stages: frozenset[int]
    following: int
    is_loaded: bool = True


def loaded_ahead(schedule: ScheduleKind, *, stage: int, stages: int, micro_batches: int) -> int:
    """Return the number of a replica's micro-batches of a step that are loaded before it begins."""
    held = in_flight(schedule, stage=stage, stages=stages, micro_batches=micro_batches)
    return min(micro_batches, held + 1)


def stage_loads(
    loading: Loading | None,
    schedule: ScheduleKind,
    *,
    stage: int,
    stages: int,
    replica: int,
    replicas: int,
    mine: range,
) -> list[tuple[Task, int]]:
    """The loads of one replica in order, each with the place of the forward, among its own, that makes room for it.

    A place below 0 says that there is room from the beginning. `mine` are its micro-batches.
    """
    if loading is None or stage not in loading.stages:
        return []
    after = range(replica, loading.following, replicas)
    own, coming = (
        loaded_ahead(schedule, stage=stage, stages=stages, micro_batches=len(part)) for part in (mine, after)
    )
    begin = own if loading.is_loaded else 0
    tasks = [Task(Kind.LOAD, stage, replica, m) for m in mine[begin:]]
    tasks += [Task(Kind.LOAD, stage, replica, m, part=1) for m in after[:coming]]
    room = SPARE if loading.is_loaded else own + SPARE
    return [(task, min(number - room, len(mine) - 1)) for number, task in enumerate(tasks)]


def with_loads(tasks: Tasks, loads: Sequence[tuple[Task, int]]) -> Tasks:
    """`tasks` of a worker's pipeline, and its `loads` as early among them as what they need; forwards need theirs."""
    left = list(loads)
    read = {task.micro_batch: task for task, _ in loads if task.part is None}
    forwards: list[Task] = []
    for task, needs in tasks:
        if task.kind is Kind.FORWARD:
            while left and left[0][1] < len(forwards):
                load, room = left.pop(0)
                yield load, (forwards[room],) if room >= 0 else ()
            forwards.append(task)
            if task.micro_batch in read:
                needs = (*needs, read[task.micro_batch])
        yield task, needs
    for load, room in left:
        yield load, (forwards[room],) if room >= 0 else ()


ON_HOST = OPEN_UPLOADS
"""The messages that the host of an accelerator holds each way at most: as many as one may have requests for."""


def with_copies(tasks: Tasks) -> Tasks:
    """`tasks` of a worker on an accelerator, with a copy after each get and before each put of a message.

    What waits for a message, or for room on the device, waits for copies. For room on the host, a get waits for the
    copy `ON_HOST` messages before, and a copy for the put `ON_HOST` messages before.
    """
    copies: list[Task] = []
    puts: list[Task] = []
    begun: tuple[Task, ...] = ()  # what else the gets so far wait for: the beginning of a late meeting
    for task, needs in tasks:
        needs = tuple(copy_of(need) if need.kind in RECEIVES | SENDS else need for need in needs)
        if task.kind in RECEIVES:
            room = tuple(need for need in needs if need.kind in (Kind.FORWARD, Kind.BACKWARD))
            begun = tuple(need for need in needs if need not in room) or begun
            yield task, (*begun, *copies[-ON_HOST : 1 - ON_HOST])
            copies.append(copy_of(task))
            yield copies[-1], (*room, task)
        elif task.kind in SENDS:
            yield copy_of(task), (*needs, *puts[-ON_HOST : 1 - ON_HOST])
            puts.append(task)
            yield task, (copy_of(task),)
        else:
            yield task, needs
