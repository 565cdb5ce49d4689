"""How much memory a computation has in use at its peak, as the allocator tells it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def live_bytes(compute: Callable[[], T]) -> tuple[T, int, int]:
    """What `compute` gives, and the bytes of torch's memory in use above those before: at the peak, and at the end."""
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with _silent():
        profiler.__enter__()  # type: ignore[no-untyped-call]
    try:
        result = compute()
    finally:
        with _silent():
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
def _silent() -> Iterator[None]:
    """Keep what the profiler's C++ code writes to standard error, whatever the log level, from the user's terminal."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
