"""What the clouds' platforms have in common: polling for the state of functions, and payloads that fit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from funcpipe.core import Invocation, PlatformSpec, WorkerSpec, to_text
from funcpipe.errors import DeadlineExceeded, PlatformRefused
from funcpipe.platforms.base import State, Status

STOP_WITHIN_S = 90.0
"""A function that was told to stop and has not ended by then is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """How often a cloud is asked, and by which clock."""

    every_s: float
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def is_due(self, asked_s: float) -> bool:
        """Whether what was asked at `asked_s` is to be asked again."""
        return self.clock() - asked_s >= self.every_s

    def await_end(self, status: Callable[[], Status], late: str) -> None:
        """Return when `status` tells that a function has ended; raises DeadlineExceeded, which says `late`."""
        until_s = self.clock() + STOP_WITHIN_S
        while status().state is State.RUNNING:
            if self.clock() > until_s:
                raise DeadlineExceeded(late)
            self.sleep(self.every_s)


def payload_of(worker: Invocation, spec: PlatformSpec, wrap_key: Callable[[str], str]) -> bytes:
    """What a function is invoked with, the run's key wrapped; raises PlatformRefused for more than it may be."""
    if isinstance(worker, WorkerSpec):
        worker = replace(worker, run_key=wrap_key(worker.run_key))
    payload = to_text(worker).encode()
    if len(payload) > spec.max_payload_bytes:
        raise PlatformRefused(
            f"the payload of worker {worker.worker} has {len(payload)} bytes, an asynchronous event of {spec.name} at "
            f"most {spec.max_payload_bytes}; fold layers together with profile --layers"
        )
    return payload
