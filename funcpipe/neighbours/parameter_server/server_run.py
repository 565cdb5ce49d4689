"""A run around a parameter server on any worker group: its settings and its result."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from funcpipe.client.prepare.job import Job
from funcpipe.core.provision import CostItem
from funcpipe.neighbours.parameter_server.loops import (
    History,
    LoopConfig,
    Watch,
    nothing_changes,
    train_asynchronously,
    train_synchronously,
)
from funcpipe.neighbours.parameter_server.values import PushRecord, Updates
from funcpipe.neighbours.parameter_server.worker_group import WorkerGroup
from funcpipe.platforms.base import Storage
from funcpipe.runstate.renewal import Renewal


class TrainedWorkerGroup(WorkerGroup, Protocol):
    """A worker group that has the trained model."""

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""


@dataclass(frozen=True, kw_only=True)
class ServerResult:
    """The result of training around a parameter server, with its cost.

    `losses` are those of synchronous steps, `step_s` the seconds that each took, `computed_by` the samples of each by
    worker. `pushes` are those of asynchronous training, with their staleness. `lost` names workers that were lost.
    `bill` has an item for each machine; machines that are not of the market are not in it.
    """

    run: str
    updates: Updates
    seconds: float
    state: Mapping[str, Tensor]
    losses: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    computed_by: tuple[Mapping[str, int], ...] = ()
    pushes: tuple[PushRecord, ...] = ()
    lost: tuple[str, ...] = ()
    server_restarts: int = 0
    bill: tuple[CostItem, ...] = ()

    @property
    def usd(self) -> float:
        """All dollars."""
        return sum(item.usd for item in self.bill)

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of asynchronous pushes; 0 if there are none."""
        return sum(push.staleness for push in self.pushes) / max(len(self.pushes), 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained `state_dict`."""
        return dict(self.state)


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """The settings of training: the batches, the kind of updates, the saves, and the watch of the cluster."""

    global_batch: int
    micro_batch: int
    updates: Updates = Updates.BSP
    save_every: int = 0
    watch: Watch = nothing_changes


def trained(job: Job, group: TrainedWorkerGroup, run: ServerRun, name: str, storage: Storage) -> ServerResult:
    """Train `job` with `group`, as the run called `name` in `storage`: all that is found but the bill."""
    with Renewal(storage, name) as renewal:
        return _trained(job, group, run, name, renewal)


def _trained(job: Job, group: TrainedWorkerGroup, run: ServerRun, name: str, renewal: Renewal) -> ServerResult:
    history, steps, began_s = History(), list[float](), time.monotonic()

    def watch(seen: object, done: float) -> None:
        renewal.renew_due(time.monotonic() - began_s)
        while len(steps) < len(history.losses):
            steps.append(time.monotonic() - began_s)
        del steps[len(history.losses) :]
        run.watch(group, done)

    config = LoopConfig(batches=job.batches, epochs=job.epochs, save_every=run.save_every, watch=watch)
    (train_synchronously if run.updates is Updates.BSP else train_asynchronously)(group, config, history)
    if run.save_every:
        group.save()
    ended_s = time.monotonic() - began_s
    ends = [*steps, *[ended_s] * (len(history.losses) - len(steps))]
    pushes = [replace(push, time_s=push.time_s - began_s) for push in history.pushes]
    mean = sum(push.samples for push in pushes) / max(len(pushes), 1)
    applied = 0
    for i, push in enumerate(pushes):
        applied += push.samples
        pushes[i] = replace(push, iterations=applied / mean)
    return ServerResult(
        run=name,
        updates=run.updates,
        seconds=ended_s,
        state=group.state_dict(),
        losses=tuple(history.losses),
        step_s=tuple(end - before for before, end in zip([0.0, *ends], ends, strict=False)),
        computed_by=tuple(history.computed_by),
        pushes=tuple(pushes),
        lost=tuple(history.lost),
        server_restarts=history.server_restarts,
    )
