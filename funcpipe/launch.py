"""Start the functions of a run on a platform, watch them, collect what they leave, clean up behind them."""

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.comm.keys import Keys
from funcpipe.computation import LossFunction, OptimizerFactory
from funcpipe.core import (
    Bill,
    Event,
    Plan,
    PlatformSpec,
    Routes,
    Source,
    StepReport,
    TensorProfile,
    TiedParameter,
    Trace,
    WorkerReport,
    WorkerSpec,
    checks,
    find_routes,
    from_text,
    prices_of,
)
from funcpipe.core.json_form import from_plain
from funcpipe.data import Batches, MapDataset
from funcpipe.errors import DeadlineExceeded, KeyMissing
from funcpipe.fleet import POLL_S, Fleet
from funcpipe.graph import LayerGraph
from funcpipe.platforms.base import Platform, Storage
from funcpipe.scheduler.clocks import aligned
from funcpipe.split import StageModule, dump_stage, split, stage_bounds
from funcpipe.worker import StageJob


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, on what, and for how long.

    `dataset` is called in every function that reads data. `prices` is the platform whose prices the bill is made with:
    the one that the plan was made for.
    """

    graph: LayerGraph
    plan: Plan
    loss: LossFunction
    optimizer: OptimizerFactory
    dataset: Callable[[], MapDataset]
    samples: int
    epochs: int
    seed: int
    shuffle: bool
    message_deadline_s: float
    prices: PlatformSpec
    clip_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None:
            checks.positive("clip_grad_norm", self.clip_grad_norm)
        _ = self.batches  # which checks that the data is enough

    @property
    def batches(self) -> Batches:
        """How the samples are dealt out over steps."""
        return Batches(
            samples=self.samples,
            global_batch=self.plan.global_batch,
            micro_batch=self.plan.micro_batch,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    @property
    def steps(self) -> int:
        """Training steps of all epochs."""
        return self.epochs * self.batches.steps_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come: `step` of `steps` has ended, with the mean `loss` over its samples.

    `cost_usd` is for the functions' time so far, and for as many requests as the plan expects.
    """

    step: int
    steps: int
    loss: float
    samples_per_s: float
    cost_usd: float


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves: the mean loss of each step, the trained tensors under the model's names, what it took."""

    run: str
    losses: tuple[float, ...]
    tensors: dict[str, Tensor]
    trace: Trace
    bill: Bill
    workers: tuple[WorkerReport, ...]

    def state_dict(self) -> dict[str, Tensor]:
        """The trained model's parameters and buffers, for its `load_state_dict`."""
        return dict(self.tensors)


def launch(
    job: Job,
    *,
    platform: Platform,
    storage: Storage,
    storage_url: str,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> RunResult:
    """Train `job` on functions of `platform` that share `storage`, which they open by `storage_url`.

    Raises InputError before any function starts; WorkerFailed or DeadlineExceeded, naming run, worker and task, after
    that. Whatever happens, no function runs and no object of the run is left afterwards.
    """
    run = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    keys = Keys(run)
    platform.check(job.plan)
    with _objects_removed(storage, keys), Fleet(platform, storage, keys, prices=job.prices) as fleet:
        for spec in upload(job, keys, storage, storage_url, platform.url):
            fleet.invoke(spec)
        losses = _watch(job, fleet, on_progress)
        fleet.wait(job.message_deadline_s)
        return _collect(job, fleet, losses)


def upload(job: Job, keys: Keys, storage: Storage, storage_url: str, platform_url: str) -> Iterator[WorkerSpec]:
    """Put every stage's code and tensors; yields the invocation payload of each worker, stage by stage."""
    bounds = stage_bounds(job.graph, job.plan)
    stage_of_layer = [stage for stage, (first, stop) in enumerate(bounds) for _ in range(first, stop)]
    routes = _routes(job.graph, stage_of_layer)
    stages = split(job.graph, bounds)
    for number, stage in enumerate(stages):
        stage_job = StageJob(
            routes=routes,
            signature=job.graph.signature,
            loss=job.loss,
            optimizer=job.optimizer,
            dataset=job.dataset if _reads_data(stage) else None,
            samples=job.samples,
            shuffle=job.shuffle,
            clip_grad_norm=job.clip_grad_norm,
        )
        bundle, tensors = dump_stage(stage, stage_job)
        storage.put(keys.bundle(number), bundle)
        storage.put(keys.parameters(number), codec.encode(tensors))
        for replica in range(job.plan.replicas):
            yield WorkerSpec(
                run=keys.run,
                attempt=keys.attempt,
                stage=number,
                replica=replica,
                plan=replace(job.plan, estimate=None, solver=None),
                storage=storage_url,
                platform=platform_url,
                bundle=keys.bundle(number),
                bundle_sha256=hashlib.sha256(bundle).hexdigest(),
                parameters=keys.parameters(number),
                epochs=job.epochs,
                seed=job.seed,
                message_deadline_s=job.message_deadline_s,
            )


def _reads_data(stage: StageModule) -> bool:
    return bool(stage.inputs) or stage.is_last


def _routes(graph: LayerGraph, stage_of_layer: Sequence[int]) -> Routes:
    tensors = [
        TensorProfile(
            name=value.name,
            producer=value.producer,
            consumers=value.consumers,
            forward_bytes=value.bytes,
            backward_bytes=value.bytes if value.differentiable else 0,
        )
        for value in graph.values
    ]
    ties = [TiedParameter(name=tie.names[0], layers=tie.layers, parameter_bytes=tie.bytes) for tie in graph.ties]
    return find_routes(stage_of_layer, tensors, ties)


def _watch(job: Job, fleet: Fleet, on_progress: Callable[[Progress], None]) -> tuple[float, ...]:
    """Follow the reports of the last stage, step by step; the mean loss of each step."""
    last = len(job.plan.stages) - 1
    losses: list[float] = []
    request_usd = job.plan.estimate.request_usd if job.plan.estimate is not None else 0.0
    samples, began_s = 0, 0.0  # both from the end of the first step, which waits for the functions to start
    for step in range(job.steps):
        reports = [_step_report(fleet, job, step, f"s{last}.r{r}") for r in range(job.plan.replicas)]
        step_samples = sum(report.samples for report in reports)
        losses.append(sum(report.loss_sum for report in reports) / step_samples)
        samples += step_samples if step else 0
        began_s = began_s or time.monotonic()
        on_progress(
            Progress(
                step=step + 1,
                steps=job.steps,
                loss=losses[-1],
                samples_per_s=samples / max(time.monotonic() - began_s, POLL_S),
                cost_usd=fleet.cost_usd() + (step + 1) * request_usd,
            )
        )
    return tuple(losses)


def _step_report(fleet: Fleet, job: Job, step: int, worker: str) -> StepReport:
    key = fleet.keys.step_report(step, worker)
    until_s = time.monotonic() + job.message_deadline_s
    while True:
        try:
            return from_text(StepReport, fleet.storage.get(key), source=key)
        except KeyMissing:
            fleet.running()
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"run {fleet.keys.run}: worker {worker} has not ended step {step} "
                    f"within {job.message_deadline_s:g} s"
                ) from None
            time.sleep(POLL_S)


def _collect(job: Job, fleet: Fleet, losses: tuple[float, ...]) -> RunResult:
    storage, keys = fleet.storage, fleet.keys
    tensors: dict[str, Tensor] = {}
    for stage in range(len(job.plan.stages)):
        tensors |= codec.decode(storage.get(keys.result(stage)))
    events: list[Event] = []
    for handle in fleet.handles:
        key = keys.trace(handle.worker)
        events += [from_plain(Event, item, source=key) for item in json.loads(storage.get(key))]
    return RunResult(
        run=keys.run,
        losses=losses,
        tensors=tensors,
        trace=_aligned(job, keys.run, events),
        bill=fleet.bill(),
        workers=fleet.reports(),
    )


def _aligned(job: Job, run: str, events: list[Event]) -> Trace:
    """A trace by one clock that begins at second 0, in order."""
    prices = prices_of(job.plan, job.prices)
    return Trace(run=run, source=Source.EXECUTED, events=aligned(events), prices=prices).from_nought()


@contextlib.contextmanager
def _objects_removed(storage: Storage, keys: Keys) -> Iterator[None]:
    """Delete every object of the run at the end."""
    try:
        yield
    finally:
        for key in storage.list(keys.prefix):
            storage.delete(key)
