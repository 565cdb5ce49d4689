"""Functions that are threads and stand still before a step: a run lasts as long as a test wants, and costs nothing."""

import re
import threading

from funcpipe.core import PlatformSpec
from funcpipe.platforms.base import Storage
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.thread_platform import ThreadPlatform

_STEP_OF_MESSAGE = re.compile(r"/messages/[^/]+/(\d{8})/")
_LOOK_S = 0.05
"""How often a function that stands still looks whether it was ended."""


class HeldPlatform(ThreadPlatform):
    """Functions that are threads. While `until` is a number, no function puts a message of a step from that one on.

    So `until` steps are done, counted from the beginning of the run, and reported. Heartbeats go on.
    """

    def __init__(self, spec: PlatformSpec, storage: Storage, *, until: int | None = None) -> None:
        super().__init__(spec, storage, faults_of=lambda number: _Held(self))
        self._until = until
        self._changed = threading.Condition()

    def hold(self, until: int) -> None:
        """Let functions do `until` steps of the run."""
        with self._changed:
            self._until = until

    def go_on(self) -> None:
        """Let functions do all steps."""
        with self._changed:
            self._until = None
            self._changed.notify_all()

    def wait_for(self, step: int, faults: FunctionFaults) -> None:
        """Return when `step` may be done, or the function is to end."""
        with self._changed:
            while self._until is not None and step >= self._until and not faults.dead.is_set():
                self._changed.wait(_LOOK_S)


class _Held(FunctionFaults):
    """Nothing goes wrong in a function that stands still before the steps that its platform holds."""

    def __init__(self, platform: HeldPlatform) -> None:
        super().__init__()
        self._platform = platform

    def next(self, written: str = "") -> int:
        """As nothing goes wrong; a message of a step that is held is not written before."""
        found = _STEP_OF_MESSAGE.search(written)
        if found:
            self._platform.wait_for(int(found[1]), self)
        return super().next(written)
