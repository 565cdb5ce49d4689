"""Endings of tasks, from the errors that Ray raises for them."""

from funcpipe.core import MB
from funcpipe.core.texts import error_text
from funcpipe.errors import WorkerFailed
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.ray.library import ray

STOPPED = Status(state=State.FAILED, reason="stopped")


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


def beyond_memory(peak_bytes: int, memory_bytes: int) -> Status:
    """Return the last status of a function that used more memory than its size has."""
    reason = f"out of memory: {peak_bytes // MB} MB of {memory_bytes // MB} MB"
    return Status(state=State.FAILED, reason=reason, cause=Cause.OUT_OF_MEMORY, peak_bytes=peak_bytes)


def _failed(text: str, cause: Cause) -> Status:
    return Status(state=State.FAILED, reason=(text.strip().splitlines() or [cause.value])[0], cause=cause)
