"""spotDNN's model (Shang et al., IWQoS 2023): asynchronous workers of different speeds around a parameter server.

The equations' numbers are those of the paper. MB and MB/s are its units.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.core import checks
from funcpipe.errors import InvalidValue
from funcpipe.neighbours.provisioning.goal import Cluster, Goal


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotType:
    """A type of machine as spotDNN sees it: its batch, the seconds that this computes, its GPUs, price and quota."""

    name: str
    batch: int
    compute_s: float
    gpus: int
    usd_h: float
    quota: int
    losses_s: float = 0.0

    def __post_init__(self) -> None:
        checks.whole("batch", self.batch, 1)
        checks.positive("compute_s", self.compute_s)
        checks.whole("quota", self.quota, 0)
        checks.positive("usd_h", self.usd_h)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSystem:
    """The model and the network: `model_mb` (S_parm), what a worker asks for (B_req), the server's link and PCIe.

    `contention_slope` and `contention_base` are α1 and β1 of equation (9); `margin` over-predicts contention, by 0.01
    to 0.05 in the paper. `server_usd_h` is billed only if `count_server`: equation (11) leaves it out.
    """

    model_mb: float
    request_mb_s: float
    server_mb_s: float
    pcie_mb_s: float = 10_000.0
    contention_slope: float = 0.8
    contention_base: float = -1.92
    margin: float = 0.0
    server: str = "server"
    server_usd_h: float = 0.0
    count_server: bool = False
    start_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("model_mb", "request_mb_s", "server_mb_s", "pcie_mb_s", "contention_slope"):
            checks.positive(name, getattr(self, name))
        if self.contention_base >= 1:
            raise InvalidValue("contention_base", self.contention_base, "must be below 1: workers alone do not contend")


Counts = tuple[int, ...]
"""The number of machines of each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrediction:
    """The predicted time and cost of `counts` machines of each type; searches compare `usd`."""

    counts: Counts
    seconds: float
    usd: float
    steps: float
    step_s: float
    cluster: Cluster


def contention(workers: int, system: SpotSystem) -> float:
    """The chance that workers contend for the server's link, by equation (9), kept within [0, 1]."""
    raw = system.contention_slope * math.sqrt(workers) + system.contention_base
    return min(max(raw, 0.0) * (1 + system.margin), 1.0)


def worker_bandwidth(workers: int, system: SpotSystem) -> float:
    """MB a second between one of `workers` workers and the server, by equation (8)."""
    share = system.server_mb_s / workers
    if system.request_mb_s <= share:
        return system.request_mb_s
    chance = contention(workers, system)
    return chance * share + (1 - chance) * system.request_mb_s


def communication_s(kind: SpotType, bandwidth_mb_s: float, system: SpotSystem) -> float:
    """Pulling parameters and pushing gradients, over the network and over PCIe to each GPU, by equation (7)."""
    return 2 * system.model_mb / bandwidth_mb_s + 2 * kind.gpus * system.model_mb / system.pcie_mb_s


def iteration_s(kind: SpotType, workers: int, system: SpotSystem) -> float:
    """Seconds of one iteration of a machine among `workers`, by equation (6)."""
    return kind.compute_s + communication_s(kind, worker_bandwidth(workers, system), system)


def compute_from_speed(samples_s: float, batch: int, gpus: int, system: SpotSystem) -> float:
    """Seconds of computation behind the measured speed of one machine alone: what equation (7) leaves of it."""
    kind = SpotType(name="measured", batch=batch, compute_s=1.0, gpus=gpus, usd_h=1.0, quota=1)
    seconds = batch / samples_s - communication_s(kind, system.request_mb_s, system)
    if seconds <= 0:
        rule = f"must be slower than its communication alone, {batch / (batch / samples_s - seconds):.0f} samples/s"
        raise InvalidValue("samples_s", samples_s, rule)
    return seconds


def cluster_of(counts: Counts, types: Sequence[SpotType], system: SpotSystem) -> tuple[Cluster, float]:
    """The weighted batch, the convergence coefficient and the seconds of a normalised iteration: (2), (4), (5).

    The fastest worker is the first of equation (5), which the paper does not say; its figure 3b fits.
    """
    workers = sum(counts)
    rate, speed, squares, fastest = 0.0, 0.0, 0.0, 0.0
    for count, kind in zip(counts, types, strict=True):
        if count:
            each_s = iteration_s(kind, workers, system)
            own = kind.batch / each_s
            rate += count / each_s
            speed += count * own
            squares += count * own * own
            fastest = max(fastest, own)
    convergence = math.sqrt(max(squares / speed**2 - 2 * fastest / speed + 1, 0.0)) if workers > 1 else 0.0
    return Cluster(batch=speed / rate, workers=workers, convergence=convergence), 1 / rate


def predict(counts: Counts, types: Sequence[SpotType], system: SpotSystem, goal: Goal) -> SpotPrediction:
    """Time and cost by equations (1) and (11); raises Infeasible if the loss is out of reach."""
    cluster, step_s = cluster_of(counts, types, system)
    steps = goal.asynchronous_steps(cluster)
    seconds = steps * step_s + system.start_s
    usd_h = sum(count * kind.usd_h for count, kind in zip(counts, types, strict=True))
    if system.count_server:
        usd_h += system.server_usd_h
    return SpotPrediction(
        counts=counts, seconds=seconds, usd=seconds * usd_h / 3600, steps=steps, step_s=step_s, cluster=cluster
    )


def most_workers(system: SpotSystem) -> int:
    """Equation (15): with more workers, contention would be certain."""
    return math.floor(((1 - system.contention_base) / system.contention_slope) ** 2)


def fewest_workers(types: Sequence[SpotType], system: SpotSystem, goal: Goal) -> int:
    """Equation (16), with the convergence term of the smallest batch alone on one worker (R + γ4 taken as at R = 0).

    It is a lower bound only if the samples that a loss needs grow with the batch; the search falls back where not.
    """
    if math.isinf(goal.deadline_s):
        return 1
    smallest = min(kind.batch for kind in types)
    fastest = max(kind.batch / iteration_s(kind, 1, system) for kind in types)
    steps = goal.asynchronous_steps(Cluster(batch=smallest, workers=1, convergence=0.0))
    return max(1, math.ceil(smallest * steps / (fastest * max(goal.deadline_s - system.start_s, 1e-9))))
