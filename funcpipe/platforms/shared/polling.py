"""Parts that the clouds' platforms share: polling for the state of functions, and payloads that fit."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from funcpipe.core import Invocation, PlatformSpec, ServerFunctionSpec, WorkerSpec, to_text
from funcpipe.errors import DeadlineExceeded, PlatformBusy, PlatformRefused
from funcpipe.platforms.base import State, Status

_log = logging.getLogger(__name__)

STOP_WITHIN_S = 90.0
"""The time in which a function must end after it was asked to stop."""

BUSY_FOR_S = 600.0
"""The time without any answer after which a cloud has failed; until then functions count as running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """The interval at which a cloud is polled, and the clock."""

    every_s: float
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def is_due(self, asked_s: float) -> bool:
        """Return True if it is time to repeat the poll made at `asked_s`."""
        return self.clock() - asked_s >= self.every_s

    def await_end(self, status: Callable[[], Status], late: str) -> None:
        """Return when `status` reports the end of a function; raises DeadlineExceeded, which says `late`."""
        until_s = self.clock() + STOP_WITHIN_S
        while status().state is State.RUNNING:
            if self.clock() > until_s:
                raise DeadlineExceeded(late)
            self.sleep(self.every_s)


class OutageTolerance:
    """Bridges the time in which a cloud does not answer when asked for the states of functions."""

    def __init__(self, polling: Polling) -> None:
        self._polling = polling
        self._busy_since_s: float | None = None

    def ask(self, request: Callable[[], None]) -> None:
        """Make a request for the states of functions; PlatformBusy is raised only after BUSY_FOR_S of nothing else."""
        now_s = self._polling.clock()
        try:
            request()
        except PlatformBusy as error:
            if self._busy_since_s is None:
                self._busy_since_s = now_s
                _log.warning("the state of functions cannot be read for now, they count as running: %s", error)
            if now_s - self._busy_since_s >= BUSY_FOR_S:
                raise
        else:
            self._busy_since_s = None


def payload_of(worker: Invocation, spec: PlatformSpec, wrap_key: Callable[[str], str]) -> bytes:
    """Return the payload of a function, the run's key wrapped; raises PlatformRefused for more than it may be."""
    if isinstance(worker, WorkerSpec | ServerFunctionSpec):
        worker = replace(worker, run_key=wrap_key(worker.run_key))
    payload = to_text(worker).encode()
    if len(payload) > spec.max_payload_bytes:
        raise PlatformRefused(
            f"the payload of worker {worker.worker} has {len(payload)} bytes, an asynchronous event of {spec.name} at "
            f"most {spec.max_payload_bytes}; fold layers together with profile --layers"
        )
    return payload
