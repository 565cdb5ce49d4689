"""The peak memory of a computation, as recorded by torch's allocator."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def live_bytes(compute: Callable[[], T]) -> tuple[T, int, int]:
    """Return the result of `compute`, and by how many bytes torch's memory in use grew: at its peak, and at the end."""
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with _stderr_discarded():
        profiler.__enter__()  # type: ignore[no-untyped-call]
    try:
        result = compute()
    finally:
        with _stderr_discarded():
            profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    now = peak = 0
    recorded = profiler.kineto_results
    events: list[Any] = recorded.events() if recorded is not None else []
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return result, peak, now


@contextlib.contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard what the profiler's C++ code writes to standard error at any log level."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
