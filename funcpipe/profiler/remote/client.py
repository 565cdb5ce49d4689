"""Functions that measure, as their client sees them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.core import ProbeSpec
from funcpipe.errors import KeyMissing, WorkerFailed
from funcpipe.platforms.base import Cause, Handle, Platform, State, Status, Storage
from funcpipe.profiler.remote import places
from funcpipe.profiler.remote.budget import Budget

POLL_S = 0.05
"""Pause between two looks at the functions."""


@dataclass(frozen=True)
class Ended:
    """A function that has measured: when it was invoked, how it ended; `late` if it was stopped for taking too long."""

    probe: ProbeSpec
    invoked_at_s: float
    status: Status
    late: bool

    @property
    def gone(self) -> bool:
        """Whether it ended for want of memory or of time."""
        return self.late or self.status.cause in (Cause.OUT_OF_MEMORY, Cause.TIMED_OUT)


def run_probes(
    platform: Platform, probes: Sequence[ProbeSpec], budget: Budget, *, longest_s: float
) -> tuple[Ended, ...]:
    """Run the functions, as many at once as the platform has room for; each at most `longest_s`.

    Functions that share the processors of one machine are run one after the other. None runs afterwards.
    """
    spec = platform.spec
    at_once = 1 if spec.shared_cores is not None else spec.max_functions
    waiting, running, ended = list(reversed(probes)), dict[Handle, tuple[ProbeSpec, float]](), list[Ended]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                probe, now_s = waiting.pop(), time.time()
                running[platform.invoke(probe)] = (probe, now_s)
            time.sleep(POLL_S)
            for handle, (probe, invoked_at_s) in list(running.items()):
                status, seconds = platform.status(handle), time.time() - invoked_at_s
                late = status.state is State.RUNNING and seconds > longest_s
                if late:
                    platform.stop(handle)
                if late or status.state is not State.RUNNING:
                    del running[handle]
                    budget.spend(spec.size(probe.size), seconds)
                    ended.append(Ended(probe, invoked_at_s, status, late))
    finally:
        for handle in running:
            platform.stop(handle)
    return tuple(ended)


def check(ended: Ended, storage: Storage) -> None:
    """Raise WorkerFailed, with what the function said, unless it ended well or for want of memory or time."""
    if ended.status.state is State.FAILED and not ended.gone:
        try:
            said = storage.get(places.failure(ended.probe.run, ended.probe.number)).decode()
        except KeyMissing:
            said = "without a word"
        who = f"run {ended.probe.run}: {ended.probe.worker}, a function of {ended.probe.size},"
        raise WorkerFailed(f"{who} {ended.status.reason}: {said}")


def remove_objects(storage: Storage, run: str) -> None:
    """Delete all objects of a run."""
    for key in storage.list(f"{run}/"):
        storage.delete(key)
