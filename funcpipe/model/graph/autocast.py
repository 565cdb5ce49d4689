"""The autocast state that holds where a model's code runs: read while it is traced, set again where its calls run."""

from contextlib import ExitStack
from types import TracebackType

import torch

from funcpipe.core import Precision

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The devices for which autocast is on, and the types that it casts to; empty where it is off."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def autocast_to(precision: Precision, *, cached: bool = True) -> torch.autocast:
    """Within this context `precision` holds, whatever held before; unless `cached`, each use casts parameters anew."""
    dtypes = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
    if precision not in dtypes:
        return torch.autocast("cpu", enabled=False, cache_enabled=cached)
    return torch.autocast("cpu", dtypes[precision], cache_enabled=cached)


def autocast_state() -> Autocast:
    """What holds now."""
    if not any(map(torch.is_autocast_enabled, _DEVICES)):
        return ()
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def changed_autocast(state: Autocast, device: str, dtype: torch.dtype | None, *, enabled: bool) -> Autocast:
    """`state` with autocast switched on or off for one device, as `torch.autocast` does inside another."""
    found = dict(state)
    found.pop(device, None)
    if enabled:
        found[device] = dtype or torch.get_autocast_dtype(device)
    return tuple((name, found[name]) for name in _DEVICES if name in found)


class AutocastRegions:
    """Sets the state for one call after the other, whatever it was before. Consecutive calls with one state share a
    region, in which a parameter is cast once. Regions end with a layer: what a layer computes does not depend on the
    layers beside it.
    """

    def __init__(self) -> None:
        self._outside = self._state = autocast_state()
        self._stack = ExitStack()

    def __enter__(self) -> "AutocastRegions":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def enter(self, state: Autocast) -> None:
        """Set the state for the next call."""
        if state == self._state:
            return
        self._stack.close()
        self._state = state
        if state == self._outside:
            return
        for device, dtype in self._outside:
            if device not in dict(state):
                self._stack.enter_context(torch.autocast(device, dtype, enabled=False))
        for device, dtype in state:
            self._stack.enter_context(torch.autocast(device, dtype))
