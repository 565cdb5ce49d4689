"""What functions hold of their GPU and of the host at their peak, beside what the cost model says.

On the device that is what tensors hold. On the host it is what a process takes beside what it has before it begins,
which is measured there: libraries, torch's and the GPU's. Of each network that is the function that writes the
checkpoint of a stage, one of two replicas that are processes (`gpu_processes.py`).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from experiments.studies.gpu_processes import run_apart
from funcpipe.client.prepare.job import Job
from funcpipe.core import MB, FaultTolerance
from tests.e2e import device_memory
from tests.e2e.plans import even_plan, momentum
from tests.in_process import make_job


def frozen(width: int) -> nn.Module:
    """Linear layers of which the last alone is trained."""
    network = device_memory.mlp(width)
    for layer in [*network.children()][:-1]:
        layer.requires_grad_(False)
    return network


LARGE: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "mlp": ("mlp", partial(device_memory.mlp, 1536)),
    "convolutions": ("convolutions", partial(device_memory.convolutions, 352)),
    "residual": ("residual", partial(device_memory.residual, 256)),
    "transformer": ("transformer", partial(device_memory.transformer, 768)),
    "tied": ("tied", partial(device_memory.Tied, 120_000)),
    "frozen": ("mlp", partial(frozen, 3072)),
}
"""The kind of each network, which has its data and its loss, and so many parameters that they are most of the host's
memory.
"""

_AT_ONCE = 3  # networks, each with two processes


def device_peaks(device: str, *, micro_batch: int) -> Iterator[dict[str, Any]]:
    """Yield the peak of each network on the device: as predicted, and as the device counts it."""
    for name, network in device_memory.NETWORKS.items():
        found = device_memory.peak(network, device, micro_batch=micro_batch)
        mb = {"predicted_mb": found.predicted_bytes / MB, "measured_mb": found.counted_bytes / MB}
        yield {"network": name, **mb, "off": found.off}


def host_peaks(device: str) -> Iterator[dict[str, Any]]:
    """Yield what each network takes of the host at its peak: as predicted, and as the system counts it."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from threads.map(lambda planned: host_peak(planned, device), [planned(name) for name in LARGE])


@dataclass(frozen=True)
class Planned:
    """A network, its job, and what a function is to need of the host beside what it has before it begins."""

    network: str
    job: Job
    needs_bytes: int


def planned(name: str) -> Planned:
    """Plan two replicas of one stage for two steps."""
    kind, model = LARGE[name]
    network = replace(device_memory.NETWORKS[kind], model=model)
    sample = (network.data(2)[0],)
    plan = even_plan(model(), sample, stages=1, replicas=2, micro_batch=2, micro_batches=1)
    samples = list(zip(*network.data(2 * plan.global_batch), strict=True))
    job = make_job(model(), plan, lambda: samples, loss=network.loss, optimizer=momentum, deadline_s=300.0)
    (stage,) = device_memory.memory_use(network, plan)
    return Planned(name, job, stage.memory_bytes - stage.base_bytes)


def host_peak(planned: Planned, device: str) -> dict[str, Any]:
    """Train with a checkpoint after each step."""
    with TemporaryDirectory() as folder:
        use = run_apart(planned.job, folder, device, faults=FaultTolerance(checkpoint_steps=1)).uses[0]
    measured_bytes = use.peak_bytes - use.base_bytes
    return {
        "network": planned.network,
        "predicted_mb": planned.needs_bytes / MB,
        "measured_mb": measured_bytes / MB,
        "off": planned.needs_bytes / measured_bytes - 1,
        "base_mb": use.base_bytes / MB,
        "driver_mb": use.driver_bytes / MB,
    }
