"""A host of functions: the process that starts them, knows their state, and has runs watched that are left alone."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from funcpipe.core import WatchSpec
from funcpipe.platforms.base import State, Status

STOPPED = Status(state=State.FAILED, reason="stopped")
_MOST_LOST = 5  # watchdogs of a run may die; the next one follows as many seconds later
_STOP_AGAIN_S = 1.0  # it may be without effect, as on a task that is on its way to a node


@dataclass(kw_only=True)
class HostedFunction:
    """A function that was started for `run`, or a watchdog, for none; `status` is set when it has ended."""

    run: str
    status: Status = field(default_factory=lambda: Status(state=State.RUNNING))
    is_stopped: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


F = TypeVar("F", bound=HostedFunction)


class Host(ABC, Generic[F]):
    """The functions of one client or of a cluster, by name, and the watchdogs of the runs that are left alone."""

    def __init__(self) -> None:
        self._functions: dict[str, F] = {}
        self._watchdogs: dict[str, asyncio.Task[None]] = {}

    @abstractmethod
    def _kill(self, function: F) -> None:
        """Have a function ended that runs; return at once."""

    @abstractmethod
    def _start_watchdog(self, spec: WatchSpec) -> F:
        """Start a function that watches a run."""

    def _abandon(self, watchdog: F) -> None:
        """Do what is to be done about a watchdog that is not needed any more; it ends when its run has ended."""

    def _unwatched(self) -> None:
        """A run is not watched any more: it has ended, or its watchdogs have died."""

    def _running(self, run: str | None = None) -> int:
        """Return the number of functions that run, of all runs or of one."""
        counted = (function for function in self._functions.values() if function.run and run in (None, function.run))
        return sum(not function.ended.is_set() for function in counted)

    async def _end(self, function: F) -> None:
        """End a function if it still runs; return when it has ended. With its last one, a run loses its watchdog."""
        while not function.ended.is_set():
            function.is_stopped = True
            self._kill(function)
            with suppress(TimeoutError):
                await asyncio.wait_for(function.ended.wait(), _STOP_AGAIN_S)
        if function.run in self._watchdogs and not self._running(function.run):
            self._watchdogs.pop(function.run).cancel()

    def _watch(self, spec: WatchSpec) -> None:
        """Have a watchdog of a run until it has ended; if one dies, another takes its place."""
        run = str(spec.run)
        if run not in self._watchdogs:
            self._watchdogs[run] = task = asyncio.get_running_loop().create_task(self._keep_watchdog(spec))
            task.add_done_callback(lambda task: self._forget_watchdog(run, task))

    async def _keep_watchdog(self, spec: WatchSpec) -> None:
        for lost in range(1, _MOST_LOST + 1):
            watchdog = self._start_watchdog(spec)
            try:
                await watchdog.ended.wait()
            except asyncio.CancelledError:
                self._abandon(watchdog)
                raise
            if watchdog.status.state is State.DONE:
                return
            await asyncio.sleep(lost)

    def _forget_watchdog(self, run: str, task: asyncio.Task[None]) -> None:
        if self._watchdogs.get(run) is task:  # or a newer one, of the same run started again, is in its place
            del self._watchdogs[run]
        self._unwatched()
