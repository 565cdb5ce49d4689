"""The functions of a run as their client sees them, and the worker that several of them are one after another."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from funcpipe.core import Outcome, WorkerSpec
from funcpipe.runstate.functions import StartedFunction


@dataclass
class WatchedFunction:
    """A function that this client has known of since `since_s`, when it was `age_s` old, and that ended at `ended_s`.

    Times are by this process's clock. `memory_mb` is its size, if this client has started it.
    """

    started: StartedFunction
    since_s: float
    memory_mb: int | None = None
    age_s: float = 0.0
    ended_s: float | None = None
    clock: Callable[[], float] = time.monotonic

    def seconds(self) -> float:
        """How long it has run, as far as is known here."""
        return self.age_s + self.watched_s()

    def watched_s(self) -> float:
        """How much of that was since this client has known of it."""
        return (self.clock() if self.ended_s is None else self.ended_s) - self.since_s


@dataclass
class WatchedWorker:
    """A worker, with the functions that were or are it, the newest last.

    `beat` is the last heartbeat that was seen, by attempt and number, and `heard_s` when it was new; heartbeats were
    last looked for at `looked_s`. `restarts` counts since a step of the run last ended. By its heartbeats it runs in a
    function of `memory_mb`, and has used `peak_bytes` at most.
    """

    spec: WorkerSpec
    functions: list[WatchedFunction] = field(default_factory=list)
    outcome: Outcome | None = None
    restarts: int = 0
    beat: tuple[int, int] = (-1, 0)
    heard_s: float = 0.0
    looked_s: float = 0.0
    peak_bytes: int = 0
    memory_mb: int | None = None

    def is_silent(self, now_s: float) -> bool:
        """Whether its newest function is asleep or never began: nothing was heard of it for too long."""
        faults = self.spec.faults
        if self.beat[0] == self.functions[-1].started.attempt:
            return now_s - self.heard_s > faults.lease_s + 2 * faults.heartbeat_s
        return now_s - self.heard_s > faults.cold_start_s + faults.start_s + (self.spec.follows_within_s or 0.0)
