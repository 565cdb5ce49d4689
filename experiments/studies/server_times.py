"""Predicted and observed times around a parameter server: BSP by λDNN's model, ASP with two speeds by spotDNN's.

Workers are Ray actors of this machine. Their computation is tiny; its seconds are imposed by sleeping, and bandwidths
by links that delay. So machines can be compared that are many times what this one is. Ray's own time comes on top.
Below each number of synchronous workers stand the parts of a step, as medians: of the slowest worker in each part, of
the server's sum and update, and what is left for Ray and the client.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, cast

from experiments.studies.server_cases import (
    FAST_S,
    LINK_MB_S,
    MICRO_BATCH,
    SERVER_MB_S,
    SLOW_S,
    job,
    model_mb,
    site,
    spot_system,
    spot_type,
    worker,
)
from funcpipe.client.job import Job
from funcpipe.parameter_server.crew import Crew, Lost, Pushed
from funcpipe.parameter_server.loops import Course, History, train_asynchronously, train_synchronously
from funcpipe.parameter_server.ray_crew import RayCrew
from funcpipe.parameter_server.values import WorkTimes
from funcpipe.platforms.ray.address import RayAddress, Via
from funcpipe.platforms.ray.connection import connected
from funcpipe.provision import lambdadnn, spotdnn
from funcpipe.training.data import Step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    links = f"links {LINK_MB_S:g} MB/s, server {SERVER_MB_S:g} MB/s"
    print(f"model {model_mb():.2f} MB, {links}, {MICRO_BATCH} samples a push")
    print(f"{'':22} {'predicted s':>12} {'observed':>9} {'error':>7}")
    with connected(RayAddress(via=Via.LOCAL, cpus=max(options.workers))):
        for count in options.workers:
            steps = bsp_observed(count, options.steps)
            print_row(f"BSP, {count} equal", bsp_predicted_s(count), fmean(step.seconds for step in steps))
            print_parts(count, steps)
        for count in options.workers:
            print_row(
                f"ASP, {count // 2} slow {count // 2} fast",
                asp_predicted_s(count),
                asp_observed_s(count, options.steps),
            )


def bsp_predicted_s(workers: int) -> float:
    """Seconds of a step, by λDNN's equations (1), (4), (5) and (7)."""
    work = lambdadnn.FunctionWorkload(
        dataset_mb=0.0,
        model_mb=model_mb(),
        local_batch=MICRO_BATCH,
        global_batch=MICRO_BATCH * workers,
        rate_slope=0.0,
        rate_base=1 / SLOW_S,
        store_slope=0.0,
        store_base=1.0,
        memory_min_mb=1,
    )
    market = lambdadnn.FunctionMarket(
        server_mb_s=SERVER_MB_S,
        function_mb_s=LINK_MB_S,
        store_mb_s=1.0,
        memory_max_mb=64,
        memory_step_mb=64,
        usd_gb_s=0.0,
        server_usd_s=0.0,
    )
    return lambdadnn.predict(workers, 64, MICRO_BATCH * workers, work, market).iteration_s


@dataclass(frozen=True)
class TimedStep:
    """A synchronous step: its seconds, those of its workers, and those of the server's sum and update."""

    seconds: float
    workers: tuple[WorkTimes, ...]
    update_s: float


class Timed:
    """Wraps a crew, and keeps how long each step took."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.steps: list[TimedStep] = []
        self._times: list[WorkTimes] = []
        self._ended_step_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._crew, name)

    def next(self) -> Pushed | Lost | None:
        """As of the crew."""
        found = self._crew.next()
        if isinstance(found, Pushed) and found.times is not None:
            self._times.append(found.times)
        return found

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """As of the crew."""
        began_s = time.monotonic()
        loss = self._crew.update(step, ids)
        ended_s = time.monotonic()
        self.steps.append(TimedStep(ended_s - self._ended_step_s, tuple(self._times), ended_s - began_s))
        self._times, self._ended_step_s = [], ended_s
        return loss


def bsp_observed(workers: int, steps: int) -> list[TimedStep]:
    """Each step but the first."""
    made = job(MICRO_BATCH * workers * (steps + 1), MICRO_BATCH * workers)
    with tempfile.TemporaryDirectory() as folder:
        machines = [worker(f"w{i}", SLOW_S) for i in range(workers)]
        with RayCrew(site(made, folder), machines) as crew:
            return timed_steps(crew, made)


def timed_steps(crew: Crew, made: Job) -> list[TimedStep]:
    """Each step but the first, of one epoch with `crew`."""
    timed = Timed(crew)
    train_synchronously(cast(Crew, timed), Course(batches=made.batches, epochs=1), History())
    return timed.steps[1:]


def asp_predicted_s(workers: int) -> float:
    """Seconds of a normalised iteration, by spotDNN's equations (4) to (9)."""
    types = [spot_type(name, each_s, usd_h=1.0, quota=workers) for name, each_s in (("slow", SLOW_S), ("fast", FAST_S))]
    return spotdnn.cluster_of((workers // 2, workers // 2), types, spot_system())[1]


def asp_observed_s(workers: int, steps: int) -> float:
    """Seconds of a normalised iteration: one divided by the pushes a second of all workers, each by its own intervals.

    Pushes come in bursts, so that the mean of all intervals of a short run depends on where it is cut.
    """
    made, history = job(MICRO_BATCH * workers * (steps + 1), MICRO_BATCH * workers), History()
    with tempfile.TemporaryDirectory() as folder:
        machines = [worker(f"w{i}", SLOW_S if i % 2 else FAST_S) for i in range(workers)]
        with RayCrew(site(made, folder), machines) as crew:
            train_asynchronously(crew, Course(batches=made.batches, epochs=1), history)
    ends = [[push.time_s for push in history.pushes if push.worker == one.name] for one in machines]
    return 1 / sum((len(own) - 1) / (own[-1] - own[0]) for own in ends)


def print_parts(workers: int, steps: list[TimedStep]) -> None:
    """The parts of a step beside the model's."""
    transfer_s = model_mb() / min(LINK_MB_S, SERVER_MB_S / workers)
    predicted = {"pull": transfer_s, "compute": MICRO_BATCH * SLOW_S, "push": transfer_s, "update": 0.0, "rest": 0.0}
    observed: dict[str, list[float]] = {name: [] for name in predicted}
    for step in steps:
        slowest = [max(getattr(one, f"{part}_s") for one in step.workers) for part in ("pull", "compute", "push")]
        whole = max(one.pull_s + one.compute_s + one.push_s for one in step.workers)
        rest = step.seconds - whole - step.update_s
        for name, seconds in zip(observed, (*slowest, step.update_s, rest), strict=True):
            observed[name].append(seconds)
    for name, seconds in predicted.items():
        print(f"  {name:20} {seconds:12.3f} {median(observed[name]):9.3f}")


def print_row(what: str, predicted_s: float, observed_s: float) -> None:
    """A line of the table."""
    print(f"{what:22} {predicted_s:12.3f} {observed_s:9.3f} {predicted_s / observed_s - 1:+7.1%}", flush=True)


if __name__ == "__main__":
    main()
