"""The autocast state that a model's code has set: read while the code is traced, set again where its calls run."""

from contextlib import ExitStack
from types import TracebackType

import torch

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The devices for which autocast is on, and the types that it casts to; empty where it is off."""

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def autocast_state() -> Autocast:
    """What holds now."""
    if not any(map(torch.is_autocast_enabled, _DEVICES)):
        return ()
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


class AutocastRegions:
    """Sets the state for one call after the other. Consecutive calls with one state share a region, in which a
    parameter is cast once. Regions end with a layer: what a layer computes does not depend on the layers beside it.
    """

    def __init__(self) -> None:
        self._state: Autocast = ()
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
        for device, dtype in state:
            self._stack.enter_context(torch.autocast(device, dtype))
