"""One function's life: load the stage, train it step by step on three lanes, leave the result in the storage."""

import hashlib
import json
import resource
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from funcpipe import allocator
from funcpipe.actions import Actions
from funcpipe.background import Background
from funcpipe.comm import codec
from funcpipe.comm.channel import Channel
from funcpipe.comm.keys import Keys
from funcpipe.comm.patience import Patience
from funcpipe.computation import Batch, Computation, LossFunction, OptimizerFactory
from funcpipe.core import Event, Plan, Routes, StepReport, Wire, WorkerReport, WorkerSpec, from_text, to_text
from funcpipe.core.json_form import to_plain
from funcpipe.data import Batches, MapDataset, Step, load
from funcpipe.errors import CorruptMessage, TaskFailed
from funcpipe.graph import Signature
from funcpipe.norms import GradientNorm, LossScale
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.wrappers import Counted
from funcpipe.retention import Retention, heard_by, readers_of
from funcpipe.scheduler.execute import execute
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.tasks import Task
from funcpipe.split import StageModule, load_stage

OPEN_REQUESTS = 4
"""How many transfers in each direction wait for their turn at once, while the body of one moves."""

MOST_DOWNLOADS = 16
"""How many downloads do where many replicas synchronise: two from each."""

TRACED_STEPS = 20
"""How many of the last steps a worker's trace holds."""


@dataclass(frozen=True)
class StageJob:
    """What a stage's bundle holds besides its module. `dataset` makes the dataset, in the stages that need it."""

    routes: Routes
    signature: Signature
    loss: LossFunction
    optimizer: OptimizerFactory
    dataset: Callable[[], MapDataset] | None
    samples: int
    shuffle: bool
    clip_grad_norm: float | None = None

    def norm(self, plan: Plan) -> GradientNorm:
        """What scales the loss, where gradients travel in 16-bit floats of little range, and clips gradients."""
        loss_scale = LossScale() if plan.gradient_wire is Wire.FP16 else None
        return GradientNorm(clip_grad_norm=self.clip_grad_norm, loss_scale=loss_scale)


def main(payload: str) -> None:
    """What every function runs: `payload` is the JSON of a WorkerSpec. Ends with exit code 1 after a failure."""
    spec = from_text(WorkerSpec, payload, source="the invocation payload")
    allocator.settle()
    torch.set_num_threads(1)
    storage = Counted(open_storage(spec.storage))
    started_at_s = time.time()
    failure: Exception | None = None
    try:
        Worker(spec, storage).run()
    except Exception as error:  # noqa: BLE001 - whatever ends a function early is reported to its client
        failure = error
    report = _report(spec, storage, started_at_s, failure)
    storage.put(Keys(spec.run, spec.attempt).worker_report(spec.worker), to_text(report).encode())
    if failure is not None:
        raise SystemExit(1)


def _report(spec: WorkerSpec, storage: Counted, started_at_s: float, failure: Exception | None) -> WorkerReport:
    traffic = storage.traffic
    root = failure.__cause__ if isinstance(failure, TaskFailed) and failure.__cause__ is not None else failure
    return WorkerReport(
        worker=spec.worker,
        started_at_s=started_at_s,
        ended_at_s=time.time(),
        puts=traffic.puts + 1,  # and this report
        gets=traffic.gets,
        empty_gets=traffic.empty_gets,
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        task=failure.task if isinstance(failure, TaskFailed) else None,
        error=None if root is None else f"{type(root).__name__}: {root}",
        traceback=None if root is None else "".join(traceback.format_exception(root)),
    )


class Worker:
    """One replica of one stage, at work on the tasks of its lanes."""

    def __init__(self, spec: WorkerSpec, storage: Storage) -> None:
        self._spec = spec
        self._storage = storage
        self._keys = Keys(spec.run, spec.attempt)
        stage, self._job = _load_bundle(spec, storage)
        self._dataset = self._job.dataset() if self._job.dataset is not None else None
        self.computation = Computation(
            stage,
            loss=self._job.loss,
            optimizer=self._job.optimizer,
            seed=spec.seed,
            recompute=spec.plan.stages[spec.stage].recompute,
            replica=spec.replica,
            replicas=spec.plan.replicas,
            number=spec.stage,
            ties=self._job.routes.ties,
            norm=self._job.norm(spec.plan),
        )
        self._cancel = threading.Event()
        patience = Patience(deadline_s=spec.message_deadline_s)
        channel = Channel(storage, patience, cancel=self._cancel)
        self._actions = Actions(self.computation, channel, self._keys, self._job.routes, spec.plan, spec.replica)

    def run(self) -> None:
        """Train for all epochs; leaves the events of the last steps and, as replica 0, the stage's tensors."""
        plan = self._spec.plan
        batches = Batches(
            samples=self._job.samples,
            global_batch=plan.global_batch,
            micro_batch=plan.micro_batch,
            seed=self._spec.seed,
            shuffle=self._job.shuffle,
        )
        events: deque[tuple[Event, ...]] = deque(maxlen=TRACED_STEPS)
        with Background(self._storage) as background:
            retention = Retention()
            for epoch in range(self._spec.epochs):
                for step in batches.epoch(epoch):
                    events.append(self._train(step, retention, background))
        self._leave_results([event for step_events in events for event in step_events])

    def _train(self, step: Step, retention: Retention, background: Background) -> tuple[Event, ...]:
        order = self._work_order(len(step.micro_batches))
        self._actions.begin(step, self._load)
        events = execute(
            order.graph,
            self._actions.run,
            step=step.number,
            cancel=self._cancel,
            open_requests=OPEN_REQUESTS,
            open_downloads=min(max(OPEN_REQUESTS, 2 * self._spec.plan.replicas), MOST_DOWNLOADS),
        )
        if self._spec.stage == len(self._spec.plan.stages) - 1:
            report = StepReport(step=step.number, samples=self.computation.samples, loss_sum=self.computation.loss_sum)
            background.put(self._keys.step_report(step.number, self._spec.worker), report)
        written = {self._keys.message(step.number, str(put)): readers for put, readers in order.readers.items()}
        background.delete(retention.after_step(written, order.heard))
        return events

    @lru_cache(maxsize=4)  # noqa: B019 - a worker lives as long as its process
    def _work_order(self, micro_batches: int) -> "_WorkOrder":
        plan, worker = self._spec.plan, (self._spec.stage, self._spec.replica)
        graph = build_graph(
            StepShape(
                stages=len(plan.stages),
                replicas=plan.replicas,
                micro_batches=micro_batches,
                routes=self._job.routes,
                schedule=plan.schedule,
                sync=plan.sync,
                norms=self.computation.norm.decides,
                streams=plan.streams,
            )
        )
        return _WorkOrder(graph.of_worker(*worker), readers_of(graph, worker), heard_by(graph, worker))

    def _leave_results(self, events: Sequence[Event]) -> None:
        self._storage.put(self._keys.trace(self._spec.worker), json.dumps([to_plain(e) for e in events]).encode())
        if self._spec.replica == 0:
            self._storage.put(self._keys.result(self._spec.stage), codec.encode(self.computation.state()))

    def _load(self, indices: Sequence[int]) -> Batch:
        assert self._dataset is not None, "a stage that reads data has a dataset"
        loaded = load(self._dataset, indices)
        return self._job.signature.bind(loaded.args, loaded.kwargs), loaded.target


@dataclass(frozen=True)
class _WorkOrder:
    """A worker's part of a step's graph; who reads each object that it writes; whom it hears from."""

    graph: Graph
    readers: Mapping[Task, frozenset[tuple[int, int]]]
    heard: frozenset[tuple[int, int]]


def _load_bundle(spec: WorkerSpec, storage: Storage) -> tuple[StageModule, StageJob]:
    bundle = storage.get(spec.bundle)
    if hashlib.sha256(bundle).hexdigest() != spec.bundle_sha256:
        raise CorruptMessage(f"{spec.bundle} is not the code that the invocation names: its SHA-256 differs")
    stage, job = load_stage(bundle, codec.decode(storage.get(spec.parameters)))
    return stage, job
