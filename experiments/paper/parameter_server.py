"""HybridPS, executed: functions that push gradients to a parameter server and pull its parameters.

The server is a process without limits, as on a virtual machine; the workers are local functions with the limits of a
platform, which reach it through their links. Objects in a folder stand for messages: a push and a pull cost a worker
one latency each and its bytes, and the server reads and writes them at once. As the policies `hybridps` and
`hybridps-ga` say, a worker keeps the activations of all its micro-batches, or of one at a time.
"""

import itertools
import json
import multiprocessing
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments.paper import trained
from funcpipe.core import Plan, PlatformSpec, RequestCounts, ScheduleKind, from_text
from funcpipe.errors import DeadlineExceeded, KeyMissing, WorkerFailed
from funcpipe.partitioner.baselines import Server
from funcpipe.platforms.base import Handle, Invoked, Platform, State, Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.platform import local_functions

DEADLINE_S = 300.0
LOOK_S = 0.01
"""A real server answers over a connection; through storage that tells of nothing, a worker looks about as soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorker:
    """The payload of one worker's function: its part of every step. With `accumulates`, it keeps one micro-batch."""

    FORMAT: ClassVar[str] = "experiments.served-worker/1"

    run: str
    number: int
    workers: int
    steps: int
    batch: int
    micro_batch: int
    accumulates: bool
    size: str
    memory_mb: int
    storage: str
    platform: str

    @property
    def worker(self) -> str:
        """Its short name."""
        return f"w{self.number}"

    @property
    def attempt(self) -> int:
        """The only one."""
        return 0

    def micro_batches(self, step: int) -> list[range]:
        """The samples of each of its micro-batches of a step: micro-batch m is worker m mod `workers`'s."""
        count = self.batch // self.micro_batch
        firsts = [step * self.batch + m * self.micro_batch for m in range(self.number, count, self.workers)]
        return [range(first, first + self.micro_batch) for first in firsts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a run with a server took: the losses, seconds of a step, and what functions and server are billed."""

    losses: tuple[float, ...]
    iteration_s: float
    function_seconds: float
    server_seconds: float
    functions_usd: float
    server_usd: float
    traffic: RequestCounts
    peak_bytes: int


def train(plan: Plan, spec: PlatformSpec, steps: int, server: Server | None = None) -> Served:
    """Train `trained.model` for some steps as a plan of one stage says, around a parameter server."""
    functions = local_functions(spec, f"{__name__}:work", preload=("torch", __name__), imposed=True)
    with tempfile.TemporaryDirectory(prefix="funcpipe-") as folder, functions as platform:
        url = Path(folder).resolve().as_uri()
        context = multiprocessing.get_context("spawn")
        serving = context.Process(target=serve, args=(url, plan.replicas, steps))
        began_s = time.time()
        serving.start()
        try:
            stage = plan.stages[0]
            handles = [
                platform.invoke(
                    ServedWorker(
                        run="hybridps",
                        number=number,
                        workers=plan.replicas,
                        steps=steps,
                        batch=plan.global_batch,
                        micro_batch=plan.micro_batch,
                        accumulates=plan.schedule is not ScheduleKind.GPIPE,
                        size=stage.size,
                        memory_mb=stage.memory_mb,
                        storage=url,
                        platform=platform.url,
                    )
                )
                for number in range(plan.replicas)
            ]
            _await(platform, handles)
        finally:
            serving.terminate()
            serving.join()
        store = open_storage(url)
        reports = [json.loads(store.get(f"report/{number}")) for number in range(plan.replicas)]
    return _result(reports, spec.size(stage.size).price_usd_s, began_s, server or Server())


def _await(platform: Platform, handles: list[Handle]) -> None:
    """Return when all functions have ended; raises WorkerFailed for the first that fails."""
    for handle in handles:
        while (status := platform.status(handle)).state is State.RUNNING:
            time.sleep(0.05)
        if status.state is State.FAILED:
            raise WorkerFailed(f"worker {handle.worker} of HybridPS failed: {status.reason}")


def _result(reports: list[dict[str, Any]], price_usd_s: float, began_s: float, server: Server) -> Served:
    ends = [max(at) for at in zip(*(report["step_ends_s"] for report in reports), strict=True)]
    seconds = sum(report["billed_s"] for report in reports)
    server_s = max(report["ended_at_s"] for report in reports) - began_s
    return Served(
        losses=tuple(sum(parts) for parts in zip(*(report["losses"] for report in reports), strict=True)),
        iteration_s=median(after - before for before, after in itertools.pairwise(ends)),
        function_seconds=seconds,
        server_seconds=server_s,
        functions_usd=seconds * price_usd_s,
        server_usd=server_s * server.price_usd_s,
        traffic=sum((RequestCounts(**report["traffic"]) for report in reports), RequestCounts()),
        peak_bytes=max(report["peak_bytes"] for report in reports),
    )


def serve(url: str, workers: int, steps: int) -> None:
    """Be the server: add up the gradients of each step, update, and give the parameters out."""
    torch.set_num_threads(1)
    store, model = open_storage(url), trained.model()
    optimizer = trained.optimizer(model.parameters())
    for step in range(steps):
        total = _read(store, f"push/{step}/0")
        for number in range(1, workers):
            total += _read(store, f"push/{step}/{number}")
        for parameter, gradient in _parts(model, total):
            parameter.grad = gradient
        optimizer.step()
        store.put(f"pull/{step}", _bytes([parameter.detach() for parameter in model.parameters()]))


def work(payload: str, invoked: Invoked | None = None) -> None:
    """Be one worker's function: for each step compute, push the gradient and pull the parameters."""
    invoked = invoked or Invoked()
    torch.set_num_threads(1)
    told = from_text(ServedWorker, payload, source="the payload of a worker")
    store = open_storage(told.storage, meter=invoked.meter)
    model, data = trained.model(), trained.data(told.steps, told.batch)
    losses, ends = [], []
    for step in range(told.steps):
        losses.append(_compute(model, data, told, step))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        store.put(f"push/{step}/{told.number}", _bytes(gradients))
        for parameter, values in _parts(model, _read(store, f"pull/{step}")):
            parameter.data.copy_(values)
            parameter.grad = None
        ends.append(time.time())
    report = {
        "losses": losses,
        "step_ends_s": ends,
        "ended_at_s": time.time(),
        "billed_s": invoked.billed_s,
        "traffic": {field.name: getattr(invoked.meter.counts, field.name) for field in fields(RequestCounts)},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    store.put(f"report/{told.number}", json.dumps(report).encode())


def _compute(model: nn.Module, data: Any, told: ServedWorker, step: int) -> float:
    """Add up the gradients of the worker's micro-batches; returns its part of the batch's mean loss."""
    scale = told.micro_batch / told.batch
    total, kept = 0.0, []
    for samples in told.micro_batches(step):
        rows = [data[place] for place in samples]
        inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
        loss = scale * trained.loss(model(inputs), targets)
        total += loss.item()
        kept.append(loss)
        if told.accumulates:
            kept.pop().backward()  # type: ignore[no-untyped-call]
    while kept:
        kept.pop().backward()  # type: ignore[no-untyped-call]
    return total


def _bytes(tensors: list[Tensor]) -> memoryview:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    values: Any = flat.numpy()
    return memoryview(values).cast("B")


def _read(store: Storage, key: str) -> Tensor:
    """The values of an object, once it is there; raises DeadlineExceeded."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        store.wait(key, 1.0 if store.watches else LOOK_S, threading.Event())
        try:
            return torch.frombuffer(bytearray(store.get(key)), dtype=torch.float32)
        except KeyMissing:
            continue
    raise DeadlineExceeded(f"{key} was not there after {DEADLINE_S:g} s")


def _parts(model: nn.Module, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its values of a flat vector."""
    place = 0
    for parameter in model.parameters():
        yield parameter, flat[place : place + parameter.numel()].view_as(parameter)
        place += parameter.numel()
