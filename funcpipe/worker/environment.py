"""What a function's code changes for the whole process, undone at its end: its environment may run other functions."""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda _: torch.set_default_device(None)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags),
)
"""Settings of torch that hold for the process, which a user's code may change."""


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Have the process afterwards as it was: variables, folder, path of modules, and torch's settings and generator.

    The other generators are seeded anew, as in a new process.
    """
    variables, folder, path = dict(os.environ), _folder(), list(sys.path)
    values, state = [read() for read, _ in _SETTINGS], torch.get_rng_state()
    try:
        yield
    finally:
        for (read, write), value in zip(_SETTINGS, values, strict=True):
            if read() != value:
                write(value)
        torch.set_rng_state(state)
        random.seed()
        np.random.seed()
        if dict(os.environ) != variables:
            os.environ.clear()
            os.environ.update(variables)
        if folder is not None and _folder() != folder:
            os.chdir(folder)
        sys.path[:] = path


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return None
