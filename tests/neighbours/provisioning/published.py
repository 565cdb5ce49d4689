"""Workloads, platforms and constants of λDNN and spotDNN, as published or released."""

from funcpipe.core.loss_model import WeightedLoss
from funcpipe.core.provision import JobSpec
from funcpipe.neighbours.provisioning.goal import Goal
from funcpipe.neighbours.provisioning.lambdadnn import FunctionMarket, FunctionWorkload
from funcpipe.neighbours.provisioning.spotdnn import SpotSystem, SpotType, communication_s

LAMBDA = FunctionMarket(
    server_mb_s=1200,
    function_mb_s=84,
    store_mb_s=115,
    memory_max_mb=3008,
    memory_step_mb=64,
    usd_gb_s=0.0000166667,
    server_usd_s=2.6e-5,
)

CNN_1D = FunctionWorkload(
    dataset_mb=41.1,
    model_mb=2,
    local_batch=32,
    global_batch=512,
    rate_slope=0.1,
    rate_base=-8.8,
    memory_min_mb=960,
    store_slope=0.002228,
    store_base=16.12,
    store_flat_mb=1792,
)
CNN_SAMPLES = 15_000

MOBILE_NET = FunctionWorkload(
    dataset_mb=148,
    model_mb=18,
    local_batch=64,
    global_batch=512,
    rate_slope=0.03,
    rate_base=5.6,
    memory_min_mb=1728,
    store_slope=0.002228,
    store_base=16.12,
    store_flat_mb=1792,
)
RESNET_50 = FunctionWorkload(
    dataset_mb=148,
    model_mb=98,
    local_batch=128,
    global_batch=1024,
    rate_slope=0.003,
    rate_base=11.3,
    memory_min_mb=2432,
    store_slope=0.002228,
    store_base=16.12,
    store_flat_mb=1792,
)
CIFAR_SAMPLES = 50_000

SPOT = SpotSystem(model_mb=11.5, request_mb_s=142, server_mb_s=1200)

_RELEASED = (
    ("p3.2xlarge", 1, 2, 0.918, 1885, 1024),
    ("g4dn.4xlarge", 1, 5, 0.3612, 750, 1024),
    ("g3.8xlarge", 2, 5, 0.684, 1018, 512),
    ("g3.16xlarge", 4, 8, 1.5676, 1995, 512),
    ("p2.8xlarge", 8, 5, 2.16, 2115, 1024),
)
"""Name, GPUs, quota, spot price, samples a second of one machine, batch of a GPU: the script's, for ResNet-110."""


def compute_from_speed(samples_s: float, batch: int, gpus: int, system: SpotSystem) -> float:
    """Seconds of computation behind the measured speed of one machine alone: what equation (7) leaves of it."""
    kind = SpotType(name="measured", batch=batch, compute_s=1.0, gpus=gpus, usd_h=1.0, quota=1)
    return batch / samples_s - communication_s(kind, system.request_mb_s, system)


def spot_types(**usd_h: float) -> tuple[SpotType, ...]:
    """The released types, with other prices by name (dots as underscores)."""
    return tuple(
        SpotType(
            name=name,
            batch=batch * gpus,
            gpus=gpus,
            usd_h=usd_h.get(name.replace(".", "_"), price),
            quota=quota,
            compute_s=compute_from_speed(speed, batch * gpus, gpus, SPOT),
        )
        for name, gpus, quota, price, speed, batch in _RELEASED
    )


RESNET_110 = WeightedLoss(gamma1=876.5, gamma2=-0.2, gamma3=2507.6, gamma5=0.5, heterogeneity=False)


def spot_goal(loss: float, deadline_s: float = 1e9) -> Goal:
    job = JobSpec(samples=CIFAR_SAMPLES, global_batch=1024, target_loss=loss, deadline_s=deadline_s)
    return Goal(job=job, loss=RESNET_110, deadline_s=deadline_s)
