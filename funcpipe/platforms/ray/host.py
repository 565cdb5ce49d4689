"""The host of functions on a cluster: an actor on its head node, which starts them as tasks and knows their state.

Ray ends a task when the process that submitted it ends. The host submits all, and no client or function does: so
functions outlive both. There is one host for a cluster, a detached actor; if it dies, its functions do, and Ray starts
it again.
"""

import asyncio
import itertools
import secrets
from dataclasses import dataclass
from typing import Any

from funcpipe.core import MB, WatchSpec, to_text
from funcpipe.core.texts import error_text
from funcpipe.errors import WorkerFailed
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.ray.library import ray
from funcpipe.platforms.ray.task import run_function
from funcpipe.platforms.shared.host import STOPPED, Host, HostedFunction

NAME = "functions-2"
"""The name of the actor; another number for another interface, so that clients of two versions can use one cluster."""

_MOST_ENDED = 10_000


@dataclass(kw_only=True)
class _Function(HostedFunction):
    """A task."""

    task: Any
    memory_bytes: int | None = None
    peak_bytes: int | None = None


class FunctionHost(Host[_Function]):
    """The functions of a cluster, and the watchdogs of the runs that are left to themselves; an asynchronous actor."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self._namespace = namespace
        self._nonce = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._following: set[asyncio.Task[None]] = set()

    async def invoke(
        self,
        run: str,
        worker: str,
        payload: str,
        cpus: float,
        memory_bytes: int | None,
        gpu: tuple[float, str | None] = (0.0, None),
    ) -> str:
        """Start a function and return its name at once. Without `memory_bytes` it takes no memory into account; `gpu`
        is how much it has of a GPU, and of what type.
        """
        name = f"{run}/{worker}/{self._nonce}-{next(self._numbers)}"
        options: dict[str, Any] = {"num_cpus": cpus, "max_retries": 0, "name": f"{run}/{worker}"}
        if memory_bytes is not None:
            options["memory"] = memory_bytes
        share, label = gpu
        if label is not None:
            options |= {"num_gpus": share, "accelerator_type": label}
        task = ray.remote(run_function).options(**options)
        started = task.remote(NAME, self._namespace, name, payload, memory_bytes)
        self._functions[name] = self._followed(_Function(run=run, task=started, memory_bytes=memory_bytes))
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
        if name in self._functions:
            await self._end(self._functions[name])

    async def watch(self, spec: WatchSpec) -> None:
        """Keep a watchdog of a run."""
        self._watch(spec)

    async def used_too_much(self, name: str, peak_bytes: int) -> None:
        """A function says that it has used more memory than its size has, and ends."""
        self._functions[name].peak_bytes = peak_bytes

    def _kill(self, function: _Function) -> None:
        if function.task is not None:
            ray.cancel(function.task, force=True, recursive=False)

    def _abandon(self, watchdog: _Function) -> None:
        self._kill(watchdog)

    def _start_watchdog(self, spec: WatchSpec) -> _Function:
        task = ray.remote(run_function).options(num_cpus=0, max_retries=0, name=f"{spec.run}/watchdog")
        started = task.remote(NAME, self._namespace, "", to_text(spec), None)
        return self._followed(_Function(run="", task=started))

    def _followed(self, function: _Function) -> _Function:
        task = asyncio.create_task(self._follow(function))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return function

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


def _last_status(function: _Function, error: BaseException) -> Status:
    if function.peak_bytes is not None and function.memory_bytes is not None:
        return _beyond_memory(function.peak_bytes, function.memory_bytes)
    return STOPPED if function.is_stopped else of_error(error)


def of_error(error: BaseException) -> Status:
    """Return the last status of a function whose task raised `error`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        text = str(cause) if isinstance(cause, WorkerFailed) else error_text(cause)
        return _failed(text, Cause.EXITED)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return _failed(f"killed by Ray, as its node was out of memory: {error}", Cause.OUT_OF_MEMORY)
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return STOPPED
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return _failed("its process died", Cause.CRASHED)
    return _failed(error_text(error), Cause.CRASHED)


def _beyond_memory(peak_bytes: int, memory_bytes: int) -> Status:
    """Return the last status of a function that used more memory than its size has."""
    reason = f"out of memory: {peak_bytes // MB} MB of {memory_bytes // MB} MB"
    return Status(state=State.FAILED, reason=reason, cause=Cause.OUT_OF_MEMORY, peak_bytes=peak_bytes)


def _failed(text: str, cause: Cause) -> Status:
    return Status(state=State.FAILED, reason=(text.strip().splitlines() or [cause.value])[0], cause=cause)
