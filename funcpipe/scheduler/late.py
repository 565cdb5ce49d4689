"""A meeting that goes on beside the steps behind it: its transfers, spread over them.

Replicas may take what they sum some steps late (`sync_delay`). Then the transfers of the meeting are divided over these
steps by the rounds of the synchronisation: with R rounds, those of round q are in the q-th of R + 1 parts, and the sums
of that round in the next one; a replica that puts no sums has R parts. With three rounds and a delay of two steps:

    round        0    1    2
    its pieces   1    1    2     the step
    its sums     1    2    2

Within a step they are spread over its computations, behind what these send, so that neither keeps the other waiting for
long: of both directions of the link, one body at a time has it.
"""

from typing import NamedTuple

from funcpipe.comm.collectives import transfers
from funcpipe.comm.sum_pattern import Move, Pattern
from funcpipe.scheduler.pipeline import RECEIVES, Tasks
from funcpipe.scheduler.tasks import Kind, Task

KIND_OF_MOVE = {
    Move.PUT_SPLIT: Kind.PUT_SPLIT,
    Move.GET_SPLIT: Kind.GET_SPLIT,
    Move.MERGE: Kind.MERGE,
    Move.PUT_MERGED: Kind.PUT_MERGED,
    Move.GET_MERGED: Kind.GET_MERGED,
}
"""The tasks of a synchronisation."""


class LatePart(NamedTuple):
    """The transfers of a meeting on `fragment` that go on beside a step: those of the steps `first` to `last`, counted
    from 0, of the `delay` steps over which they are spread.
    """

    fragment: int
    delay: int
    first: int
    last: int

    @property
    def ends_with_tied(self) -> bool:
        """True if the sums of tied parameters, which are in the first fragment, come last."""
        return self.fragment == 0 and self.last == self.delay - 1


def late_tasks(late: LatePart, pattern: Pattern, stage: int, replica: int) -> Tasks:
    """Yield the part of a meeting that goes on beside a step.

    Nothing of it waits for transfers of its own worker but what is added up, and what sends sums on, so that what the
    step asks for later never waits for it.
    """
    parts = pattern.streams.rounds + pattern.spreads
    flatten = Task(Kind.FLATTEN, stage, replica, fragment=late.fragment, delay=late.delay)
    begun = (flatten,) if late.first == 0 else ()
    if begun:
        yield flatten, ()
    moves: list[Task] = []
    there: set[Task] = set()
    for transfer in transfers(pattern, replica):
        task = flatten._replace(kind=KIND_OF_MOVE[transfer.move], peer=transfer.peer, part=transfer.part)
        moves.append(task)
        part = pattern.round_of(transfer) + (transfer.move in (Move.PUT_MERGED, Move.GET_MERGED))
        if late.first <= part * late.delay // parts <= late.last:
            there.add(task)
            adds = transfer.move in (Move.MERGE, Move.PUT_MERGED)
            needs = [moves[i] for i in transfer.after if adds or moves[i].kind is Kind.MERGE]
            yield task, tuple(need for need in needs if need in there) or begun


def with_late(tasks: Tasks, late: Tasks) -> Tasks:
    """`tasks` of a worker's step, and its `late` ones, spread over the computations, behind what these send."""
    own, left = list(tasks), list(late)
    begun = tuple(task for task, _ in left if task.kind is Kind.FLATTEN)
    yield from left[: len(begun)]
    left = left[len(begun) :]
    kinds = [task.kind for task, _ in own]
    computed = [i for i, kind in enumerate(kinds) if kind in (Kind.FORWARD, Kind.BACKWARD)]
    places = [
        -1,
        *(next(j for j in range(i, len(own)) if not kinds[j + 1 : j + 2] or not kinds[j + 1].is_put) for i in computed),
    ]
    cuts = [len(left) * i // len(places) for i in range(len(places) + 1)]
    after = {place: left[cuts[i] : cuts[i + 1]] for i, place in enumerate(places)}
    yield from after[-1]
    for i, (task, needs) in enumerate(own):
        yield task, needs if needs or task.kind not in RECEIVES else begun
        yield from after.get(i, ())
