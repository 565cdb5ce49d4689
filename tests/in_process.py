"""All workers of a run as threads of the test's own process, on storage in memory: fast, and open to inspection.

Threads share torch's random number generator, so the models must not draw.
"""

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Outcome, Plan, Precision, WorkerSpec
from funcpipe.core.accelerator import Accelerator
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.model.graph import trace
from funcpipe.platforms.base import OPEN, Gate, Invoked, Storage
from funcpipe.platforms.catalog import load_spec, open_platform
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.recipe import Recipe
from funcpipe.worker.loop import Worker
from funcpipe.worker.setup import load_worker
from tests.e2e.plans import sample_numbers
from tests.e2e.reference import train
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests


def make_job(
    model: nn.Module,
    plan: Plan,
    dataset: Callable[[], Any],
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    epochs: int = 1,
    deadline_s: float = 20.0,
    **recipe: Any,
) -> Job:
    samples = dataset()
    inputs = tuple(torch.stack([samples[i][k] for i in range(plan.micro_batch)]) for k in range(len(samples[0]) - 1))
    return Job(
        graph=trace(model, inputs, precision=recipe.get("precision", Precision.FP32)),
        plan=plan,
        recipe=Recipe(loss=loss, optimizer=optimizer, **recipe),
        dataset=dataset,
        samples=len(samples),
        epochs=epochs,
        seed=0,
        shuffle=True,
        message_deadline_s=deadline_s,
        prices=load_spec("local"),
    )


def prepared_run(
    job: Job,
    storage: Storage,
    *,
    storage_url: str = "file:///unused",
    platform_url: str = "local:///unused",
    faults: FaultTolerance = DEFAULT_FAULTS,
    accelerated: bool = False,
) -> PreparedRun:
    """The run of `job`, ready to be uploaded to `storage` for functions of a platform that starts none."""
    spec = load_spec("local")
    if accelerated:
        spec = replace(spec, sizes=tuple(replace(size, accelerator=GPU) for size in spec.sizes))
    platform = Recording(url=platform_url, spec=spec)
    return prepare(job, session_on(Site(platform, storage, storage_url)), faults=faults)


GPU = Accelerator(
    name="GPU", memory_mb=16_000, vcpu_equivalents=40.0, fp32_tflop_s=8.0, memory_gb_s=300.0, host_device_gb_s=10.0
)


class Killed(Exception):
    """The function is gone."""


class Killing(MemoryStorage):
    """A storage that kills the function that puts the first object whose key fits `last`, once it is there."""

    def __init__(self, last: str | None = None) -> None:
        super().__init__()
        self.last = last

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        if self.last is not None and re.search(self.last, key):
            self.last = None
            raise Killed(key)


def run_workers(
    job: Job,
    storage: Storage,
    run: str = "run-1",
    *,
    platform_url: str = "local:///unused",
    faults: FaultTolerance = DEFAULT_FAULTS,
    accelerated: bool = False,
    hand_over: bool = False,
) -> dict[str, Worker]:
    """Train; the workers by name, as they are after training. One that is killed gets another attempt; the first other
    error of any is raised. Functions that are `accelerated` compute on the accelerator of this process. With
    `hand_over`, the first function of each worker reaches the end of its life in its first step, and hands over.
    """
    prepared = prepared_run(job, storage, platform_url=platform_url, faults=faults, accelerated=accelerated)
    specs: list[WorkerSpec] = list(upload(prepared, Keys(run, 0, NONCE)))
    with ThreadPoolExecutor(len(specs)) as pool:
        work = _run_and_hand_over if hand_over else _run
        started = {spec.worker: pool.submit(work, spec, storage) for spec in specs}
        return {worker: future.result() for worker, future in started.items()}


def train_both(
    model: nn.Module,
    plan: Plan,
    dataset: Callable[[], Any],
    *,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    epochs: int = 2,
    clip_grad_norm: float | None = None,
) -> tuple[dict[str, Worker], nn.Module]:
    """Train `model` by `plan` and a copy of it in one process; the workers, and the copy."""
    expected = copy.deepcopy(model)
    job = make_job(model, plan, dataset, loss=loss, optimizer=optimizer, epochs=epochs, clip_grad_norm=clip_grad_norm)
    workers = run_workers(job, MemoryStorage())
    samples = dataset()
    steps = sample_numbers(plan, len(samples), epochs=epochs)
    train(expected, samples, loss_fn=loss, optimizer=optimizer, steps=steps, clip_grad_norm=clip_grad_norm)
    return workers, expected


def states(workers: dict[str, Worker]) -> dict[str, torch.Tensor]:
    """The state of the whole model, from what each worker holds."""
    found = [worker.computation.state().state_dict() for worker in workers.values()]
    return {name: tensor for state in found for name, tensor in state.items()}


def _run(spec: WorkerSpec, storage: Storage) -> Worker:
    worker = load_worker(spec, signed_for_tests(storage), open_platform)
    try:
        assert worker.run() is Outcome.FINISHED
    except Exception as error:
        if not isinstance(error.__cause__ or error, Killed) or spec.attempt:
            raise
        return _run(replace(spec, attempt=1), storage)
    return worker


def _run_and_hand_over(spec: WorkerSpec, storage: Storage) -> Worker:
    platform, signed = Recording(url=spec.platform), signed_for_tests(storage)
    write_payload(signed, Keys.of(spec), spec)
    first = load_worker(spec, signed, platform.open, invoked=Invoked(lifetime_s=1e-3))
    assert first.run() is Outcome.HANDED_OVER
    (successor,) = platform.invoked
    assert isinstance(successor, WorkerSpec)
    return _run(successor, storage)
