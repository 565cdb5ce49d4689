"""Run probe functions, and wait for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.core import ProbeSpec
from funcpipe.errors import KeyMissing, WorkerFailed
from funcpipe.platforms.base import Cause, Platform, State, Status, Storage
from funcpipe.platforms.function_group import FunctionGroup
from funcpipe.profiler.remote import keys
from funcpipe.profiler.remote.budget import Budget

POLL_S = 0.05
"""Pause between two polls of the functions."""


@dataclass(frozen=True)
class FinishedProbe:
    """A probe that has ended: when it was invoked, its status, and whether it was stopped as too `late`."""

    probe: ProbeSpec
    invoked_at_s: float
    status: Status
    late: bool

    @property
    def out_of_resources(self) -> bool:
        """True if it ran out of memory or time."""
        return self.late or self.status.cause in (Cause.OUT_OF_MEMORY, Cause.TIMED_OUT)


def run_probes(
    platform: Platform, probes: Sequence[ProbeSpec], budget: Budget, *, longest_s: float
) -> tuple[FinishedProbe, ...]:
    """Run the functions, as many at once as the platform allows; each at most `longest_s`.

    Functions that share the processors of one machine run one after the other. All have ended on return.
    """
    spec = platform.spec
    at_once = 1 if spec.shared_cores is not None else spec.max_functions
    waiting, ended = {probe.worker: probe for probe in probes}, list[FinishedProbe]()
    by_worker = dict(waiting)
    with FunctionGroup(platform) as group:
        while waiting or group.running:
            while waiting and len(group.running) < at_once:
                group.start(waiting.pop(next(iter(waiting))), patient=True)
            time.sleep(POLL_S)
            for function in group.running:
                status, seconds = group.poll(function), function.watched_s()
                late = status.state is State.RUNNING and seconds > longest_s
                if late:
                    group.stop([function])
                if function.ended_s is not None:
                    probe = by_worker[function.started.worker]
                    budget.spend(spec.size(probe.size), seconds)
                    ended.append(FinishedProbe(probe, function.started.started_at_s, status, late))
    return tuple(ended)


def check(ended: FinishedProbe, storage: Storage) -> None:
    """Raise WorkerFailed, with the function's traceback, if it failed other than by running out of memory or time."""
    if ended.status.state is State.FAILED and not ended.out_of_resources:
        try:
            failure = storage.get(keys.failure(ended.probe.run, ended.probe.number)).decode()
        except KeyMissing:
            failure = "it left no traceback"
        who = f"run {ended.probe.run}: {ended.probe.worker}, a function of {ended.probe.size},"
        raise WorkerFailed(f"{who} {ended.status.reason}: {failure}")


def remove_objects(storage: Storage, run: str) -> None:
    """Delete all objects of a run."""
    storage.delete_many(storage.list(f"{run}/"))
