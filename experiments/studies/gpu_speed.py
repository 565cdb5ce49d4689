"""The speed of functions on this machine's GPU: the lanes between it and the host, one stage, and two beside a plan.

Lanes are timed each way, with pinned memory alone, and as messages of stages cross, which are pinned first. One stage
and a plain loop take turns. Two stages are two processes, which share the device; the simulator predicts them from what
layers, lanes and the storage take here.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from experiments.studies.gpu_processes import run_apart
from funcpipe.analysis.compare import typical_iteration_s
from funcpipe.analysis.predict import predict
from funcpipe.core import (
    MB,
    Events,
    FaultTolerance,
    LayerReport,
    ModelProfile,
    Plan,
    PlatformSpec,
    ScheduleKind,
    Source,
    Trace,
)
from funcpipe.core.accelerator import Work
from funcpipe.model.graph import trace
from funcpipe.model.split import StageModule
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.process import usable_processors
from funcpipe.profiler.measure import Loss, Measure, Timing, Trial
from funcpipe.profiler.profile import profile
from funcpipe.profiler.remote.storage_speed import measure_storage
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.device import Device
from tests.e2e import device_memory
from tests.e2e.networks import Network
from tests.e2e.plans import even_plan, momentum
from tests.in_process import GPU, make_job, run_workers
from tests.support.run_keys import NONCE, signed_for_tests
from tests.support.stand_in_device import NAME

LANES_MB = (1, 16, 64)
MESSAGE_MB = 16
"""About the size of messages of `REAL`."""
REPEATS = 10
MICRO_BATCHES, STEPS = 4, 6
NO_CHECKPOINTS = FaultTolerance(checkpoint_steps=1000)


@dataclass(frozen=True)
class Speed:
    """What is timed: so wide a transformer, with so large micro-batches, so many rounds of a stage and a plain loop."""

    width: int
    micro_batch: int
    rounds: int

    @property
    def network(self) -> Network:
        """The transformer."""
        return replace(device_memory.NETWORKS["transformer"], model=partial(device_memory.transformer, self.width))

    def plan(self, stages: int) -> Plan:
        """A plan of so many stages."""
        sample = (self.network.data(2)[0],)
        return even_plan(
            self.network.model(),
            sample,
            stages=stages,
            replicas=1,
            micro_batch=self.micro_batch,
            micro_batches=MICRO_BATCHES,
            schedule=ScheduleKind.ONE_F_ONE_B,
        )

    def samples(self) -> list[tuple[Tensor, ...]]:
        """Samples of all steps."""
        return list(zip(*self.network.data(STEPS * MICRO_BATCHES * self.micro_batch), strict=True))


REAL, STAND_IN = Speed(1024, 128, 5), Speed(64, 8, 3)


def lanes(device: str) -> Iterator[dict[str, float]]:
    """Yield the 10^9 bytes per second that cross each way, by the size of the message in MB."""
    for mb in LANES_MB:
        yield {"mb": mb, **lane(device, mb * MB)}


def lane(device: str, size: int) -> dict[str, float]:
    """Return the 10^9 bytes per second of so many bytes: copied with pinned memory, and as messages cross."""
    module, here = torch.get_device_module(device), Device(torch.device(device, 0))
    host, stream = torch.ones(size // 4), module.Stream()
    pinned, there = host.pin_memory(), host.to(device)

    def copied(target: Tensor, source: Tensor) -> None:
        with module.stream(stream):
            target.copy_(source, non_blocking=True)
            stream.record_event().synchronize()

    ways: dict[str, Callable[[], object]] = {
        "to_device": lambda: copied(there, pinned),
        "to_host": lambda: copied(pinned, there),
        "received": lambda: here.receive({"x": host}),
        "sent": lambda: here.send({"x": there}, here.computed()),
    }
    return {way: size / 1e9 / median_s(work) for way, work in ways.items()}


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median seconds of `work`, which has been done once before."""
    work()
    return median(seconds(work) for _ in range(repeats))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def one_stage(speed: Speed, device: str) -> dict[str, float]:
    """Return seconds of a step of one stage and of a plain loop, and how fast the stage is beside it."""
    stage_s, plain_s = [], []
    for _ in range(speed.rounds):
        stage_s.append(stage_step_s(speed))
        plain_s.append(plain_step_s(speed, device))
    return {"stage_s": median(stage_s), "plain_s": median(plain_s), "speed": median(plain_s) / median(stage_s)}


def stage_step_s(speed: Speed) -> float:
    """Return the median seconds of a step of one stage, a thread of this process."""
    storage, samples, network = MemoryStorage(), speed.samples(), speed.network
    job = make_job(network.model(), speed.plan(1), lambda: samples, loss=network.loss, optimizer=momentum)
    run_workers(job, storage, accelerated=True, faults=NO_CHECKPOINTS)
    return typical_iteration_s(observed(storage, stages=1))


def plain_step_s(speed: Speed, device: str) -> float:
    """Return the median seconds of a step of plain PyTorch, whose batches are there already."""
    torch.manual_seed(0)
    network, batch = speed.network, MICRO_BATCHES * speed.micro_batch
    model = network.model().to(device).train()
    optimizer, (inputs, targets) = momentum(model.parameters()), network.data(batch)
    pairs = [*zip(*(torch.split(values, speed.micro_batch) for values in (inputs, targets)), strict=True)]

    def step() -> None:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for x, target in pairs:
            loss = network.loss(model(x.to(device)), target.to(device)) / MICRO_BATCHES
            torch.autograd.backward(loss)
            total += loss.detach()
        optimizer.step()
        total.item()  # waits for the device

    return median_s(step, STEPS - 1)


def two_stages(speed: Speed, device: str, message_gb_s: float) -> dict[str, float]:
    """Return seconds of a step of two stages in two processes: predicted, observed, and the share that is reached."""
    plan, samples, network = speed.plan(2), speed.samples(), speed.network
    job = make_job(network.model(), plan, lambda: samples, loss=network.loss, optimizer=momentum, deadline_s=300.0)
    with TemporaryDirectory() as folder:
        spec = measured_spec(folder, device, message_gb_s)
        predicted_s = predict(plan, measured_profile(speed, spec, device), spec).duration_s
        storage = run_apart(job, folder, device, faults=NO_CHECKPOINTS).storage
        observed_s = typical_iteration_s(observed(storage, stages=2))
    return {"predicted_s": predicted_s, "observed_s": observed_s, "speed": predicted_s / observed_s}


def observed(storage: Storage, *, stages: int) -> Trace:
    """Return the last steps of the only replica of each stage."""
    keys, signed = Keys("run-1", 0, NONCE), signed_for_tests(storage)
    found = [get_document(signed, Events, keys.trace(f"s{stage}.r0", 0)).events for stage in range(stages)]
    return Trace(run="run-1", source=Source.EXECUTED, events=tuple(event for events in found for event in events))


def measured_spec(folder: str, device: str, message_gb_s: float) -> PlatformSpec:
    """Return functions of this machine, with one device that they share, or processors that stand in for it."""
    url = f"file://{folder}"
    report = measure_storage(open_storage(url), url, streams=1, body_bytes=16 * MB)
    gpu, spec = replace(GPU, host_device_gb_s=message_gb_s), load_spec("local")
    up, down = report.upload_bytes_s, report.download_bytes_s
    sizes = tuple(replace(size, accelerator=gpu, upload_bytes_s=up, download_bytes_s=down) for size in spec.sizes)
    devices = usable_processors() if device == NAME else 1
    return replace(spec, sizes=sizes, latency_s=report.put.median_s, shared_cores=devices)


def measured_profile(speed: Speed, spec: PlatformSpec, device: str) -> ModelProfile:
    """Return the profile of the network, with seconds measured on the device."""
    network = speed.network
    inputs, targets = network.data(speed.micro_batch)
    here = {device_: targets.to(device_) for device_ in ("cpu", device)}

    def loss(output: Tensor) -> Tensor:
        return network.loss(output, here[output.device.type])

    return profile(
        *(trace(network.model(), (inputs,)), (inputs,)),
        spec=spec,
        micro_batch=speed.micro_batch,
        loss=loss,
        repeats=REPEATS,
        on=on_device(device, len(spec.sizes)),
    )


def on_device(device: str, sizes: int) -> Measure:
    """Measure seconds of layers on the device, the same for so many sizes of functions, and nothing else of them."""
    module, nothing = torch.get_device_module(device), Work(flop=0, dense_bytes=0, other_bytes=0)

    def timed(work: Callable[[], None]) -> float:
        def done() -> None:
            work()
            module.current_stream().record_event().synchronize()

        return seconds(done)

    def measure(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        own, given = copy.deepcopy(stage), {name: value.to(device) for name, value in values.items()}
        Device(torch.device(device, 0)).move(own)
        forward_s, backward_s = [], []
        for _ in range(1 + repeats):
            trial = Trial(own, given, loss)
            forward_s.append(timed(trial.forward))
            trial.make_output_gradients()
            backward_s.append(timed(trial.backward))
        report = LayerReport(
            forward_s=tuple(forward_s[1:]),
            backward_s=tuple(backward_s[1:]),
            workspace_bytes=0,
            forward_work=nothing,
            backward_work=nothing,
        )
        return lambda: [report] * sizes

    return measure
