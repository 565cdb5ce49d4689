"""The tasks that move micro-batches through the stages and back: receives, computation, sends."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from funcpipe.core import Routes, ScheduleKind
from funcpipe.scheduler.schedules import actions, in_flight
from funcpipe.scheduler.tasks import Kind, Task

Tasks = Iterator[tuple[Task, tuple[Task, ...]]]
"""Tasks of one worker in order, each with the tasks of the same worker that it needs."""

RECEIVES = frozenset({Kind.GET_ACTIVATION, Kind.GET_GRADIENT})
"""Transfers into a stage; what one of them needs never ends before what those before it on their lane need."""

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
