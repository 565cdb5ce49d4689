"""The loops of training around a parameter server, synchronous and asynchronous.

    BSP   deal out the micro-batches of a step by speed, wait for all gradients, update, repeat
    ASP   give the next micro-batches to each idle worker, update with each push

A worker that is lost, or that leaves, costs at most what it was computing: that is dealt out again. If the server is
lost, training goes on from its newest checkpoint.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from funcpipe.core import checks
from funcpipe.errors import WorkerFailed
from funcpipe.neighbours.parameter_server.worker_group import (
    Chunk,
    Lost,
    Pushed,
    PushRecord,
    ServerLost,
    ServerWorker,
    WorkerGroup,
)
from funcpipe.training.batches import Batches, Step

_log = logging.getLogger(__name__)

_SERVER_RESTARTS = 5

Watch = Callable[[WorkerGroup, float], None]
"""A callback that gets the share of the work that is done, often; it may let workers leave and join."""


def nothing_changes(group: WorkerGroup, done: float) -> None:
    """Watch a cluster that stays as it is."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The settings of a training loop: `epochs` of `batches`, saved after every `save_every` updates (0: never)."""

    batches: Batches
    epochs: int
    save_every: int = 0
    watch: Watch = nothing_changes

    def __post_init__(self) -> None:
        checks.whole("epochs", self.epochs, 1)
        checks.whole("save_every", self.save_every, 0)

    @property
    def width(self) -> int:
        """The micro-batch ids that each step reserves."""
        return -(-self.batches.global_batch // self.batches.micro_batch)

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.epochs * self.batches.steps_per_epoch

    def ids(self, step: Step) -> tuple[int, ...]:
        """The ids of all numbers of a step, those too that a short one lacks: so that ids have no gaps."""
        return tuple(range(step.number * self.width, (step.number + 1) * self.width))


@dataclass
class History:
    """The events since `first` updates; after a return to a checkpoint, only those that it holds."""

    first: int | None = None
    losses: list[float] = field(default_factory=list)
    pushes: list[PushRecord] = field(default_factory=list)
    computed_by: list[dict[str, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    server_restarts: int = 0

    def return_to(self, version: int) -> None:
        """Forget all updates after `version`; the first call says where this history begins."""
        if self.first is None:
            self.first = version
        kept = version - self.first
        del self.losses[kept:], self.computed_by[kept:], self.pushes[kept:]


def train_synchronously(group: WorkerGroup, config: LoopConfig, history: History) -> None:
    """Train by BSP. Raises WorkerFailed when no worker is left."""
    while True:
        try:
            first = group.progress().version
            history.return_to(first)
            for step in config.batches.steps_from(first, config.epochs):
                config.watch(group, step.number / config.steps)
                history.computed_by.append(_collect(group, config, step, history))
                history.losses.append(group.update(step, config.ids(step)))
                if config.save_every and (step.number + 1) % config.save_every == 0:
                    group.save()
            return
        except ServerLost as error:
            _restart(group, history, error)


def _collect(group: WorkerGroup, config: LoopConfig, step: Step, history: History) -> dict[str, int]:
    """Return once the gradients of all micro-batches of `step` are with the server: samples by worker."""
    missing = set(range(len(step.micro_batches)))
    waiting = sorted(missing)  # for a worker
    samples: dict[str, int] = {}
    while missing:
        if waiting:
            done = step.number / config.steps
            if workers := _workers(group, config, history, done, others=len(waiting) < len(missing)):
                _deal_out(group, config, step, waiting, workers)
                waiting = []
        match group.next():
            case Pushed(worker=worker, chunk=chunk) if chunk.step.number == step.number:
                missing -= set(chunk.numbers)
                computed = sum(len(step.micro_batches[number]) for number in chunk.numbers)
                samples[worker] = samples.get(worker, 0) + computed
            case Lost(worker=worker, chunks=chunks, reason=reason):
                _note(history, worker, reason)
                again = {number for chunk in chunks for number in chunk.numbers} & missing
                waiting = sorted({*waiting, *again})
            case _:
                config.watch(group, step.number / config.steps)
    return samples


def _deal_out(
    group: WorkerGroup, config: LoopConfig, step: Step, numbers: Sequence[int], workers: Sequence[ServerWorker]
) -> None:
    first = step.number * config.width
    for worker, part in zip(workers, deal(numbers, [w.speed for w in workers]), strict=True):
        if part:
            ids = tuple(first + number for number in part)
            group.begin(worker.name, Chunk(step=step, numbers=part, ids=ids, separate=True))


def train_asynchronously(group: WorkerGroup, config: LoopConfig, history: History) -> None:
    """Train by ASP. Raises WorkerFailed when no worker is left."""
    while True:
        try:
            _apply_all(group, config, history)
            return
        except ServerLost as error:
            _restart(group, history, error)


def _apply_all(group: WorkerGroup, config: LoopConfig, history: History) -> None:
    progress = group.progress()
    history.return_to(progress.version)
    work, busy = _Work(config, progress.below, progress.beyond), set[str]()
    total = config.epochs * config.batches.samples
    samples = progress.samples
    while True:
        for free in group.workers:
            if free.name not in busy and (chunk := work.take(free.push)) is not None:
                group.begin(free.name, chunk)
                busy.add(free.name)
        if not busy:
            if not work.has_more():
                return
            _workers(group, config, history, samples / total, others=False)
        match group.next():
            case Pushed(worker=worker, chunk=done, applied=applied, time_s=time_s):
                busy.discard(worker)
                if applied is not None:
                    loss, staleness = applied
                    samples += done.step.samples
                    history.pushes.append(
                        PushRecord(
                            worker=worker,
                            samples=done.step.samples,
                            loss=loss,
                            staleness=staleness,
                            iterations=len(history.pushes) + 1.0,
                            time_s=time_s,
                        )
                    )
                    if config.save_every and len(history.pushes) % config.save_every == 0:
                        group.save()
            case Lost(worker=worker, chunks=chunks, reason=reason):
                busy.discard(worker)
                _note(history, worker, reason)
                work.put_back(chunks)
        config.watch(group, samples / total)


class _Work:
    """The micro-batches of a run that no worker has taken, in order."""

    def __init__(self, config: LoopConfig, below: int, beyond: Sequence[int]) -> None:
        self._config = config
        self._done = set(beyond)
        self._below = below
        self._steps: Iterator[Step] = config.batches.steps_from(below // config.width, config.epochs)
        self._left: deque[tuple[int, Step, tuple[int, ...]]] = deque()  # id, its step, its samples
        self._back: deque[Chunk] = deque()

    def has_more(self) -> bool:
        while not self._left and not self._back and (step := next(self._steps, None)) is not None:
            first = step.number * self._config.width
            items = ((first + number, step, indices) for number, indices in enumerate(step.micro_batches))
            self._left.extend(item for item in items if item[0] >= self._below and item[0] not in self._done)
        return bool(self._left or self._back)

    def take(self, count: int) -> Chunk | None:
        """Up to `count` micro-batches of one step; None if nothing is left. What was put back comes first."""
        if not self.has_more():
            return None
        if self._back:
            return self._back.popleft()
        _, step, _ = self._left[0]
        taken: list[tuple[int, Step, tuple[int, ...]]] = []
        while self._left and self._left[0][1] is step and len(taken) < count:
            taken.append(self._left.popleft())
        ids, width = [number for number, _, _ in taken], self._config.width
        if not self._left:  # ids that a short step lacks count as done with its last ones
            ids += [number for number in range(ids[-1] + 1, (step.number + 1) * width) if number not in self._done]
        batches = tuple(indices for _, _, indices in taken)
        # a step of its own: the loss is averaged over the push, and random numbers differ from those of other pushes
        own = Step(
            number=ids[0], epoch=step.epoch, micro_batches=batches, ends_epoch=step.ends_epoch and not self._left
        )
        return Chunk(step=own, numbers=tuple(range(len(batches))), ids=tuple(ids), separate=False)

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """Give `chunks` to others."""
        self._back.extend(chunks)


def _workers(
    group: WorkerGroup, config: LoopConfig, history: History, done: float, *, others: bool
) -> Sequence[ServerWorker]:
    """The workers that may be given work. There may be none while some start, or while `others` still compute.

    Raises WorkerFailed where none will come.
    """
    if not group.workers:
        config.watch(group, done)
    workers = group.workers
    if not workers and not group.is_starting and not others:
        last = f"; the last was lost: {history.lost[-1]}" if history.lost else ""
        raise WorkerFailed(
            f"no worker is left{last}; run it again under the same name, where there is room for workers: it goes on "
            "from the newest checkpoint"
        )
    return workers


def _note(history: History, worker: str, reason: str) -> None:
    _log.warning("worker %s is lost: %s", worker, reason)
    history.lost.append(f"{worker}: {reason}")


def _restart(group: WorkerGroup, history: History, error: ServerLost) -> None:
    _log.warning("the parameter server is lost: %s; a new one starts from the newest checkpoint", error)
    history.server_restarts += 1
    if history.server_restarts > _SERVER_RESTARTS:
        raise WorkerFailed(f"the parameter server was lost {history.server_restarts} times, at last because of {error}")
    group.restart_server()


T = TypeVar("T")


def counts_by_speed(items: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Each worker's number of `items` equal pieces of work, so that the last one ends as early as possible.

    Each piece goes to the worker that would end it first, which is optimal for equal pieces; the first worker on a tie.
    """
    counts = [0] * len(speeds)
    ends = [(1 / speed, i) for i, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(items):
        _, i = ends[0]
        counts[i] += 1
        heapq.heapreplace(ends, ((counts[i] + 1) / speeds[i], i))
    return tuple(counts)


def deal(items: Sequence[T], speeds: Sequence[float]) -> tuple[tuple[T, ...], ...]:
    """`items` in order, cut into a run of neighbours for each worker, by speed; slow workers may get none."""
    parts, start = [], 0
    for count in counts_by_speed(len(items), speeds):
        parts.append(tuple(items[start : start + count]))
        start += count
    return tuple(parts)
