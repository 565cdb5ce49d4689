"""All workers of a run as threads of the test's own process, on storage in memory: fast, and open to inspection.

Threads share torch's random number generator, so the models must not draw.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from funcpipe.client.follow.upload import upload
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Plan, WorkerSpec
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.model.graph import trace
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_platform
from funcpipe.runstate.keys import Keys
from funcpipe.training.recipe import Recipe
from funcpipe.worker.loop import Worker
from funcpipe.worker.setup import load_worker
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
    clip_grad_norm: float | None = None,
) -> Job:
    samples = dataset()
    inputs = tuple(torch.stack([samples[i][k] for i in range(plan.micro_batch)]) for k in range(len(samples[0]) - 1))
    return Job(
        graph=trace(model, inputs),
        plan=plan,
        recipe=Recipe(loss=loss, optimizer=optimizer, clip_grad_norm=clip_grad_norm),
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
) -> PreparedRun:
    """The run of `job`, ready to be uploaded to `storage` for functions of a platform that starts none."""
    return prepare(job, session_on(Site(Recording(url=platform_url), storage, storage_url)), faults=faults)


def run_workers(
    job: Job, storage: Storage, run: str = "run-1", *, faults: FaultTolerance = DEFAULT_FAULTS
) -> dict[str, Worker]:
    """Train; the workers by name, as they are after training. The first error of any worker is raised."""
    specs: list[WorkerSpec] = list(upload(prepared_run(job, storage, faults=faults), Keys(run, 0, NONCE)))
    with ThreadPoolExecutor(len(specs)) as pool:
        started = {spec.worker: pool.submit(_run, spec, storage) for spec in specs}
        return {worker: future.result() for worker, future in started.items()}


def _run(spec: WorkerSpec, storage: Storage) -> Worker:
    worker = load_worker(spec, signed_for_tests(storage), open_platform)
    worker.run()
    return worker
