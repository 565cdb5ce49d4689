"""The host of functions on a cluster: an actor on its head node, which starts them as tasks and knows their state.

Ray ends a task when the process that submitted it ends. The host submits all, and no client or function does: so
functions outlive both. There is one host for a cluster, a detached actor; if it dies, its functions do, and Ray starts
it again.
"""

import asyncio
import itertools
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from funcpipe.core import MB, WatchSpec, to_text
from funcpipe.core.texts import error_text
from funcpipe.errors import WorkerFailed
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.ray.library import ray
from funcpipe.platforms.ray.task import run_function

NAME = "functions-1"
"""The name of the actor; another number for another interface, so that clients of two versions can use one cluster."""

_MOST_LOST = 5  # watchdogs of a run may die; the next one follows as many seconds later
_MOST_ENDED = 10_000
_STOP_AGAIN_S = 1.0


@dataclass
class _Function:
    """A task; `status` is set when it has ended."""

    run: str
    task: Any
    memory_bytes: int | None
    status: Status = field(default_factory=lambda: Status(state=State.RUNNING))
    is_stopped: bool = False
    peak_bytes: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class FunctionHost:
    """The functions of a cluster, and the watchdogs of the runs that are left to themselves; an asynchronous actor."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._nonce = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._functions: dict[str, _Function] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._watchdogs: dict[str, asyncio.Task[None]] = {}

    async def invoke(self, run: str, worker: str, payload: str, cpus: float, memory_bytes: int | None) -> str:
        """Start a function and return its name at once. Without `memory_bytes` it takes no memory into account."""
        name = f"{run}/{worker}/{self._nonce}-{next(self._numbers)}"
        options: dict[str, Any] = {"num_cpus": cpus, "max_retries": 0, "name": f"{run}/{worker}"}
        if memory_bytes is not None:
            options["memory"] = memory_bytes
        task = ray.remote(run_function).options(**options)
        started = task.remote(NAME, self._namespace, name, payload, memory_bytes)
        self._functions[name] = function = _Function(run, started, memory_bytes)
        self._keep(asyncio.create_task(self._follow(function)))
        return name

    async def status(self, name: str) -> Status:
        """Return the function's state; one of an earlier host has died with it."""
        function = self._functions.get(name)
        if function is None:
            reason = "the host of functions that started it has ended"
            return Status(state=State.FAILED, reason=reason, cause=Cause.CRASHED)
        return function.status

    async def stop(self, name: str) -> None:
        """End the function if it still runs; return when it has ended. With its last one, a run loses its watchdog."""
        function = self._functions.get(name)
        if function is None:
            return
        await self._end(function)
        others = [other for other in self._functions.values() if other.run == function.run]
        if function.run in self._watchdogs and all(other.ended.is_set() for other in others):
            self._watchdogs.pop(function.run).cancel()

    async def watch(self, spec: WatchSpec) -> None:
        """Keep a watchdog of a run."""
        run = str(spec.run)
        if run not in self._watchdogs:
            self._watchdogs[run] = task = asyncio.create_task(self._watch(run, to_text(spec)))
            self._keep(task)

    async def used_too_much(self, name: str, peak_bytes: int) -> None:
        """A function says that it has used more memory than its size has, and ends."""
        self._functions[name].peak_bytes = peak_bytes

    async def _end(self, function: _Function) -> None:
        while not function.ended.is_set():
            function.is_stopped = True
            ray.cancel(
                function.task, force=True, recursive=False
            )  # without effect while a task is on its way to a node
            with suppress(TimeoutError):
                await asyncio.wait_for(function.ended.wait(), _STOP_AGAIN_S)

    async def _follow(self, function: _Function) -> None:
        try:
            await function.task
            function.status = Status(state=State.DONE)
        except ray.exceptions.RayError as error:
            function.status = _last_status(function, error)
        function.task = None
        function.ended.set()
        ended = [name for name, other in self._functions.items() if other.ended.is_set()]
        for name in ended[:-_MOST_ENDED]:
            del self._functions[name]

    async def _watch(self, run: str, payload: str) -> None:
        """Have a watchdog until the run has ended; if one dies, another takes its place."""
        for lost in range(1, _MOST_LOST + 1):
            task = ray.remote(run_function).options(num_cpus=0, max_retries=0, name=f"{run}/watchdog")
            watchdog = _Function("", task.remote(NAME, self._namespace, "", payload, None), None)
            following = asyncio.create_task(self._follow(watchdog))
            try:
                await following
            except asyncio.CancelledError:
                ray.cancel(watchdog.task, force=True, recursive=False)
                raise
            if watchdog.status.state is State.DONE:
                break
            await asyncio.sleep(lost)
        self._watchdogs.pop(run, None)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._following.add(task)
        task.add_done_callback(self._following.discard)


def _last_status(function: _Function, error: BaseException) -> Status:
    if function.peak_bytes is not None and function.memory_bytes is not None:
        return _beyond_memory(function.peak_bytes, function.memory_bytes)
    return _STOPPED if function.is_stopped else of_error(error)


_STOPPED = Status(state=State.FAILED, reason="stopped")


def of_error(error: BaseException) -> Status:
    """Return the last status of a function whose task raised `error`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        text = str(cause) if isinstance(cause, WorkerFailed) else error_text(cause)
        return _failed(text, Cause.EXITED)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return _failed(f"killed by Ray, as its node was out of memory: {error}", Cause.OUT_OF_MEMORY)
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return _STOPPED
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return _failed("its process died", Cause.CRASHED)
    return _failed(error_text(error), Cause.CRASHED)


def _beyond_memory(peak_bytes: int, memory_bytes: int) -> Status:
    """Return the last status of a function that used more memory than its size has."""
    reason = f"out of memory: {peak_bytes // MB} MB of {memory_bytes // MB} MB"
    return Status(state=State.FAILED, reason=reason, cause=Cause.OUT_OF_MEMORY, peak_bytes=peak_bytes)


def _failed(text: str, cause: Cause) -> Status:
    return Status(state=State.FAILED, reason=(text.strip().splitlines() or [cause.value])[0], cause=cause)
