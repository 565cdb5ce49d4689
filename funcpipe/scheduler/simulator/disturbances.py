"""Disturbances of a simulated step: contention, shared links and processors, noise, cold starts, stragglers, deaths.

For example, noise of 0.1 on a forward of 2 s: the variation is that of a log-normal number whose logarithm has the
standard deviation √log(1 + 0.1²) = 0.0998 and the mean -0.0998²/2 = -0.005. For a standard normal draw of 1, the
forward takes 2 · exp(0.0998 - 0.005) = 2.199 s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from funcpipe.core import Resource, checks, worker_name
from funcpipe.errors import InvalidValue
from funcpipe.scheduler.simulator.compiled_graph import LANES, GraphColumns
from funcpipe.scheduler.simulator.costs import Array, Costs

Worker = tuple[int, int]
"""Stage and replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A worker dies at `at_s`, starts again `restart_s` later, and repeats the whole step; its objects remain."""

    worker: Worker
    at_s: float
    restart_s: float

    def __post_init__(self) -> None:
        checks.at_least("at_s", self.at_s, 0)
        checks.at_least("restart_s", self.restart_s, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """The disturbances of a step; by default there are none, and every task takes as long as it takes alone.

    `contention` divides the speed of a computation while bytes of its function move. `shared_bytes_s` caps the bytes
    that all functions together move in each direction, through all stores or through each by its number;
    `shared_cores` caps the processors that they compute on. Those who could use more get equal shares.
    `compute_jitter` and `transfer_jitter` are coefficients of variation: each task's time is multiplied by a log-normal
    number with mean 1, drawn from `seed`; `cold_start_jitter` does the same to `cold_start_s`, the seconds before a
    worker's first task. `stragglers` multiplies all times of some workers.
    """

    contention: float = 1.0
    shared_bytes_s: float | tuple[float | None, ...] | None = None
    shared_cores: int | None = None
    compute_jitter: float = 0.0
    transfer_jitter: float = 0.0
    cold_start_s: float = 0.0
    cold_start_jitter: float = 0.0
    seed: int = 0
    stragglers: Mapping[Worker, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        checks.at_least("contention", self.contention, 1)
        for name in ("compute_jitter", "transfer_jitter", "cold_start_s", "cold_start_jitter", "seed"):
            checks.at_least(name, getattr(self, name), 0)
        for name, caps in (("shared_bytes_s", self.caps_bytes_s), ("shared_cores", (self.shared_cores,))):
            for cap in caps:
                if cap is not None:
                    checks.positive(name, cap)
        for worker, factor in self.stragglers.items():
            checks.positive(f"stragglers[{worker}]", factor)

    @property
    def independent(self) -> bool:
        """True if no task slows another down and no worker dies."""
        shared = any(cap is not None for cap in (*self.caps_bytes_s, self.shared_cores))
        return self.contention == 1.0 and not shared and not self.failures

    @property
    def even(self) -> bool:
        """True if workers that do the same take the same time."""
        noise = self.compute_jitter, self.transfer_jitter, self.cold_start_s and self.cold_start_jitter
        return not (any(noise) or self.stragglers or self.failures)

    @property
    def caps_bytes_s(self) -> tuple[float | None, ...]:
        """The cap of each store; where there is but one, all share it."""
        caps = self.shared_bytes_s
        return caps if isinstance(caps, tuple) else (caps,)

    def check_workers(self, workers: Mapping[Worker, int]) -> None:
        """Raise InvalidValue if a straggler or a failure names a worker that is not in `workers`."""
        for worker in (*self.stragglers, *(failure.worker for failure in self.failures)):
            if worker not in workers:
                raise InvalidValue("worker", worker_name(*worker), "must be a stage and a replica of the plan")


UNDISTURBED = Disturbances()


def disturbed(costs: Costs, columns: GraphColumns, disturbances: Disturbances) -> Costs:
    """Return `costs` with noise for each task, and with stragglers."""
    if not (disturbances.compute_jitter or disturbances.transfer_jitter or disturbances.stragglers):
        return costs
    draw = np.random.default_rng(disturbances.seed)
    compute = columns.lanes == LANES.index(Resource.COMPUTE)
    factor = log_normal(draw, np.where(compute, disturbances.compute_jitter, disturbances.transfer_jitter))
    if disturbances.stragglers:
        slower = np.ones((1 + columns.stages.max(), columns.of_replicas))
        for worker, times in disturbances.stragglers.items():
            slower[worker] = times
        factor *= slower[columns.stages, columns.replicas]
    return replace(costs, seconds=costs.seconds * factor, body_bytes=costs.body_bytes * factor)


def poll_delays(costs: Costs, disturbances: Disturbances) -> list[float] | None:
    """Return, for each task, after how long a poll finds the object that came while it was waited for.

    That is any time up to the pause between two polls: objects do not come in time with them. None if nothing polls.
    """
    if not costs.poll_s.any():
        return None
    draw = np.random.default_rng((disturbances.seed, 2))
    delays_s: list[float] = (costs.poll_s * draw.random(len(costs.poll_s))).tolist()
    return delays_s


def cold_starts(workers: int, disturbances: Disturbances) -> Array:
    """Return seconds before each worker's first task."""
    draw = np.random.default_rng((disturbances.seed, 1))
    return disturbances.cold_start_s * log_normal(draw, np.full(workers, disturbances.cold_start_jitter))


def log_normal(draw: np.random.Generator, variation: Array) -> Array:
    """Random numbers with mean 1, one for each coefficient of variation in `variation`."""
    sigma = np.sqrt(np.log1p(variation**2))
    numbers: Array = np.exp(sigma * draw.standard_normal(len(variation)) - sigma**2 / 2)
    return numbers
