"""What the simulator reads and returns: the costs of tasks, and their starts and ends, as arrays in the graph's order.

For example, a forward of 2 s and an upload of 10 bytes over a link of 5 bytes/s with a latency of 0.04 s::

    seconds  [2, 0.04]    body_bytes  [0, 10]    link_bytes_s  [inf, 5]    alone_s  [2, 2.04]

If the upload waits for the forward, its Timeline has rows [0, 1], starts_s [0, 2] and ends_s [2, 4.04].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from funcpipe.core import Event, Source, Trace
from funcpipe.errors import InvalidValue
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import RESOURCES, Task

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a task: first `seconds`, then `payload_bytes` at no more than `link_bytes_s`.

    Without a link, moving the bytes is part of the seconds. Transfers through the same `store`, by number, share what
    it moves. A computation keeps `processors` busy, at most one, which counts where functions share them. A get that
    has to wait for its object asks for it every `poll_s` seconds, until it is there.
    """

    seconds: float
    payload_bytes: float = 0
    link_bytes_s: float | None = None
    store: int = 0
    processors: float = 1.0
    poll_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise InvalidValue("seconds", self.seconds, "must be at least 0")
        if self.link_bytes_s is not None and not self.link_bytes_s > 0:
            raise InvalidValue("link_bytes_s", self.link_bytes_s, "must be more than 0")
        if not 0 < self.processors <= 1:
            raise InvalidValue("processors", self.processors, "must be more than 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all tasks: first `seconds`, then `body_bytes` at no more than `link_bytes_s` (infinite without one).

    `payload_bytes` is what an event reports, also where moving the bytes is part of the seconds.
    """

    seconds: Array
    body_bytes: Array
    link_bytes_s: Array
    payload_bytes: npt.NDArray[np.int64]
    stores: npt.NDArray[np.int64]
    processors: Array
    poll_s: Array

    @property
    def alone_s(self) -> Array:
        """The time of each task when nothing disturbs it."""
        return self.seconds + self.body_bytes / self.link_bytes_s

    def rows(self, numbers: npt.NDArray[np.int64]) -> "Costs":
        """Return the costs of the tasks with these numbers."""
        return Costs(
            seconds=self.seconds[numbers],
            body_bytes=self.body_bytes[numbers],
            link_bytes_s=self.link_bytes_s[numbers],
            payload_bytes=self.payload_bytes[numbers],
            stores=self.stores[numbers],
            processors=self.processors[numbers],
            poll_s=self.poll_s[numbers],
        )


def costs_of(graph: Graph, cost: Callable[[Task], Cost], *, uniform: bool = False) -> Costs:
    """Ask `cost` for every task; with `uniform`, once for all tasks that differ only in micro-batch and replica."""
    if not uniform:
        return _columns([cost(task) for task in graph.tasks])
    places: dict[tuple[object, ...], int] = {}
    sorts = [places.setdefault((task[0], task[1], *task[4:]), len(places)) for task in graph.tasks]
    examples = dict(zip(reversed(sorts), reversed(graph.tasks), strict=True))
    table = _columns([cost(examples[place]) for place in range(len(places))])
    return table.rows(np.array(sorts, dtype=np.int64))


def _columns(costs: list[Cost]) -> Costs:
    return Costs(
        seconds=np.array([cost.seconds for cost in costs], dtype=np.float64),
        body_bytes=np.array([cost.payload_bytes if cost.link_bytes_s else 0 for cost in costs], dtype=np.float64),
        link_bytes_s=np.array([cost.link_bytes_s or np.inf for cost in costs], dtype=np.float64),
        payload_bytes=np.array([round(cost.payload_bytes) for cost in costs], dtype=np.int64),
        stores=np.array([cost.store for cost in costs], dtype=np.int64),
        processors=np.array([cost.processors for cost in costs], dtype=np.float64),
        poll_s=np.array([cost.poll_s for cost in costs], dtype=np.float64),
    )


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """One run of a task, at `position` in the graph; `attempt` counts the earlier deaths of its worker."""

    position: int
    start_s: float
    end_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The start and end of each of `tasks`: they are in the columns, at the task's place in `rows`.

    Replicas that do the same have the same rows. `lost` are earlier runs, or parts of runs, that ended with the death
    of their worker.
    """

    tasks: Sequence[Task]
    rows: npt.NDArray[np.int64]
    payload_bytes: npt.NDArray[np.int64]
    starts_s: Sequence[float]
    ends_s: Sequence[float]
    attempts: Sequence[int]
    lost: tuple[LostAttempt, ...] = ()

    @property
    def duration_s(self) -> float:
        """The end of the last task; the step starts at 0."""
        return max(self.ends_s, default=0.0)

    def trace(self, *, run: str, step: int = 0) -> Trace:
        """Return the same as events, in order of their start."""
        events = sorted(self._events(step), key=lambda event: (event.start_s, event.end_s))
        return Trace(run=run, source=Source.SIMULATED, events=tuple(events))

    def _events(self, step: int) -> Iterator[Event]:
        for task, row in zip(self.tasks, self.rows.tolist(), strict=True):
            yield self._event(task, step, LostAttempt(row, self.starts_s[row], self.ends_s[row], self.attempts[row]))
        for lost in self.lost:
            yield self._event(self.tasks[lost.position], step, lost)

    def _event(self, task: Task, step: int, done: LostAttempt) -> Event:
        return Event(
            task=str(task),
            stage=task.stage,
            replica=task.replica,
            lane=RESOURCES[task.kind],
            step=step,
            start_s=done.start_s,
            end_s=done.end_s,
            payload_bytes=int(self.payload_bytes[done.position]),
            attempt=done.attempt,
        )
