"""Predicted and observed times around a parameter server: BSP by λDNN's model, ASP with two speeds by spotDNN's.

Workers are Ray actors of this machine. Their computation is tiny; its seconds are imposed by sleeping, and bandwidths
by links that delay. So machines can be compared that are many times what this one is. Ray's own time comes on top.
"""

import argparse
import itertools
import tempfile
import time
from statistics import median

from experiments.server_cases import (
    FAST_S,
    LINK_MB_S,
    MICRO_BATCH,
    SERVER_MB_S,
    SLOW_S,
    job,
    model_mb,
    site,
    worker,
)
from funcpipe.parameter_server.crew import Crew
from funcpipe.parameter_server.loops import Course, History, train_asynchronously, train_synchronously
from funcpipe.parameter_server.ray_crew import Connection, RayCrew
from funcpipe.provision import lambdadnn, spotdnn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    links = f"links {LINK_MB_S:g} MB/s, server {SERVER_MB_S:g} MB/s"
    print(f"model {model_mb():.2f} MB, {links}, {MICRO_BATCH} samples a push")
    print(f"{'':22} {'predicted s':>12} {'mean s':>8} {'error':>7} {'median s':>9} {'error':>7}")
    with Connection(None, processors=max(options.workers)):
        for count in options.workers:
            _print(f"BSP, {count} equal", bsp_predicted_s(count), bsp_observed_s(count, options.steps))
        for count in options.workers:
            _print(
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


def bsp_observed_s(workers: int, steps: int) -> list[float]:
    """Seconds of each step but the first."""
    made, ends = job(MICRO_BATCH * workers * (steps + 1), MICRO_BATCH * workers), list[float]()

    def watch(crew: Crew, done: float) -> None:
        if len(ends) < round(done * (steps + 1)):
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        machines = [worker(f"w{i}", SLOW_S) for i in range(workers)]
        with RayCrew(site(made, folder), machines) as crew:
            train_synchronously(crew, Course(batches=made.batches, epochs=1, watch=watch), History())
            ends.append(time.monotonic())
    return [end - before for before, end in itertools.pairwise(ends)]


def asp_predicted_s(workers: int) -> float:
    """Seconds of a normalised iteration, by spotDNN's equations (4) to (9)."""
    types = [
        spotdnn.SpotType(name=name, batch=MICRO_BATCH, compute_s=MICRO_BATCH * each_s, gpus=0, usd_h=1.0, quota=workers)
        for name, each_s in (("slow", SLOW_S), ("fast", FAST_S))
    ]
    system = spotdnn.SpotSystem(model_mb=model_mb(), request_mb_s=LINK_MB_S, server_mb_s=SERVER_MB_S)
    return spotdnn.cluster_of((workers // 2, workers // 2), types, system)[1]


def asp_observed_s(workers: int, steps: int) -> list[float]:
    """Seconds from push to push, after the first ones."""
    made, history = job(MICRO_BATCH * workers * (steps + 1), MICRO_BATCH * workers), History()
    with tempfile.TemporaryDirectory() as folder:
        machines = [worker(f"w{i}", SLOW_S if i % 2 else FAST_S) for i in range(workers)]
        with RayCrew(site(made, folder), machines) as crew:
            train_asynchronously(crew, Course(batches=made.batches, epochs=1), history)
    ends = [push.time_s for push in history.pushes][workers:-workers]  # while all are busy
    return [end - before for before, end in itertools.pairwise(ends)]


def _print(what: str, predicted_s: float, observed_s: list[float]) -> None:
    mean_s, median_s = sum(observed_s) / len(observed_s), median(observed_s)
    errors = [f"{predicted_s / seen - 1:+.1%}" for seen in (mean_s, median_s)]
    print(
        f"{what:22} {predicted_s:12.3f} {mean_s:8.3f} {errors[0]:>7} {median_s:9.3f} {errors[1]:>7}",
        flush=True,
    )


if __name__ == "__main__":
    main()
