"""The start and end of each task of a played graph, as columns; turned into a trace of events only on demand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from funcpipe.core import Event, Source, Trace
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.simulator.costs import Costs


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """One run of a task, at `position` in the graph; `attempt` counts the earlier deaths of its worker."""

    position: int
    start_s: float
    end_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The start and end of each task of `graph`: three columns with one element for each task, in graph order.

    `lost` are earlier runs, or parts of runs, that ended with the death of their worker.
    """

    graph: Graph
    costs: Costs
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
        kept = (
            LostAttempt(position, *when)
            for position, when in enumerate(zip(self.starts_s, self.ends_s, self.attempts, strict=True))
        )
        resources = {task.kind: task.kind.resource for task in self.graph.tasks}
        for done in (*kept, *self.lost):
            task = self.graph.tasks[done.position]
            yield Event(
                task=str(task),
                stage=task.stage,
                replica=task.replica,
                lane=resources[task.kind],
                step=step,
                start_s=done.start_s,
                end_s=done.end_s,
                payload_bytes=int(self.costs.payload_bytes[done.position]),
                attempt=done.attempt,
            )
