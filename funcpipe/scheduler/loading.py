"""The tasks that load micro-batches, ahead of the forwards that read them, and over the ends of steps.

At the end of a step the first micro-batches of the next one are loaded: as many as the schedule has in flight, and one
more. So loading has the whole step to hide behind computation, under GPipe too, whose forwards come all at once. From
then on a micro-batch is loaded for each one that a forward has taken, and `SPARE` beyond these.

By hand, for steps of 4 micro-batches under 1F1B with one in flight: 2 of the step were loaded before. Its own tasks are
load.m2, load.m3, and for the next step load.m0.k1, load.m1.k1. The first two may start at once, the third needs
forward.m0, the fourth forward.m1; forward.m2 needs load.m2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.core import ScheduleKind
from funcpipe.scheduler.pipeline import Tasks
from funcpipe.scheduler.schedules import in_flight
from funcpipe.scheduler.tasks import Kind, Task

SPARE = 2
"""The micro-batches that a lane may have loaded beyond those that are to be there when a step begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The loading in a step: by which `stages`, and for how many micro-batches in the `following` step.

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
