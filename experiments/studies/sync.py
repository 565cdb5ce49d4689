"""How fast replicas sum a gradient over throttled links, each in a process of its own, with objects as files.

Printed for each way: seconds by the closed form, simulated, and measured, the median and the least from the common
start to the end of the slowest replica; the median by the form, by the limit (which includes two latencies), and by the
first format's; and the processor seconds of a replica. *fastest* is the fastest stream or exchange with at most 20 puts
of a replica. On a machine that has other work, the least says more, and processor seconds say most.

    python -m experiments.studies.sync --replicas 4 --megabytes 64 --ways fastest pipelined --wire-sync fp32 bf16
"""

import argparse
import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import pattern
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.comm.int8_chunks import gradient_chunks, new_feedback
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import SYNC_WIRES, Resource, Streams, Sync, Wire
from funcpipe.core.choices import OPEN_UPLOADS, open_downloads
from funcpipe.partitioner.cost.stores import requests_each
from funcpipe.partitioner.cost.sync_choice import candidates
from funcpipe.partitioner.cost.sync_time import limit_s, sync_time_s
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.local.throttle import OwnPace, Throttled
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import Graph, build_graph
from funcpipe.scheduler.tasks import SIDE_BY_SIDE, Kind, Task
from funcpipe.worker.synchronisation import Synchronisation
from tests.partitioner.sync_links import Links, duration_s
from tests.support.plans import sum_shape
from tests.support.run_keys import RUN_KEY

DEADLINE_S = 120.0
FASTEST = "fastest"
MOST_PUTS = 20
WAYS = (Sync.THREE_PHASE.value, Sync.PIPELINED.value, Sync.ALL_REDUCE.value, FASTEST)
Barrier = multiprocessing.synchronize.Barrier


@dataclass(frozen=True)
class Way:
    """A synchronisation to measure: its algorithm, its size, its links, and its format."""

    sync: Sync
    streams: Streams | None
    replicas: int
    gradient_bytes: int
    links: Links
    wire: Wire = Wire.FP32

    @property
    def sent_bytes(self) -> float:
        """The gradient's bytes in its format."""
        return self.wire.ratio * self.gradient_bytes

    @property
    def pattern(self) -> Pattern:
        return pattern(self.sync, self.replicas, self.streams)

    @property
    def formula_s(self) -> float:
        return float(
            sync_time_s(
                self.sync,
                gradient_bytes=self.sent_bytes,
                replicas=self.replicas,
                upload_bytes_s=self.links.up,
                download_bytes_s=self.links.down,
                latency_s=self.links.latency_s,
                streams=self.streams,
            )
        )

    def __str__(self) -> str:
        name = self.sync.value
        if self.streams is not None:
            name += f" ({self.streams.rounds}, {self.streams.groups}, {self.streams.merged})"
        return f"{name} {self.wire.value}"


@dataclass(frozen=True)
class Result:
    """Seconds of each repetition, and the processor's of each replica for all of them."""

    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--wire-sync", nargs="+", choices=[wire.value for wire in SYNC_WIRES], default=["fp32"])
    parser.add_argument("--mb-per-s", type=float, default=35.0)
    parser.add_argument("--latency-ms", type=float, default=40.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    rate = options.mb_per_s * 1e6
    print(" n   MB  way                      formula s  simulated  measured   least  /formula  /limit  /first    cpu s")
    for replicas in options.replicas:
        links = Links(rate, rate, options.latency_ms / 1e3, OPEN_UPLOADS, open_downloads(replicas))
        for megabytes in options.megabytes:
            asked = (options.ways, replicas, megabytes * 1_000_000, links)
            for same in zip(*(ways(*asked, Wire(wire)) for wire in options.wire_sync), strict=True):
                show([(way, run(way, options.repeat)) for way in same])


def ways(names: Sequence[str], replicas: int, gradient_bytes: int, links: Links, wire: Wire) -> list[Way]:
    """Those of the names."""
    chosen = [Way(Sync(name), None, replicas, gradient_bytes, links, wire) for name in names if name != FASTEST]
    streams = [
        Way(sync, cut, replicas, gradient_bytes, links, wire)
        for sync, cut in candidates(replicas)
        if requests_each(sync, replicas, cut)[0] <= MOST_PUTS
    ]
    return chosen + [min(streams, key=lambda way: way.formula_s)] * (FASTEST in names)


def show(same: Sequence[tuple[Way, Result]]) -> None:
    """Print a line for each format in which a way was measured."""
    first_s = median(same[0][1].seconds)
    for way, result in same:
        measured_s = median(result.seconds)
        least_s = float(limit_s(way.sent_bytes, way.replicas, way.links.up, way.links.down, way.links.latency_s))
        simulated_s = duration_s(way.pattern, way.sent_bytes, way.links)
        print(
            f"{way.replicas:2} {way.gradient_bytes // 10**6:4}  {way!s:24} {way.formula_s:9.3f} {simulated_s:10.3f} "
            f"{measured_s:9.3f} {min(result.seconds):7.3f} {measured_s / way.formula_s:9.3f} "
            f"{measured_s / least_s:7.3f} {measured_s / first_s:7.3f} {mean(result.cpu_s) / len(result.seconds):8.3f}",
            flush=True,
        )


def run(way: Way, repeat: int) -> Result:
    """Every replica in a process of its own, `repeat` times and once to warm up."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(way.replicas), context.SimpleQueue()
    processes = [
        context.Process(target=_replica, args=(way, replica, repeat, folder, barrier, results))
        for replica in range(way.replicas)
    ]
    try:
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
        shutil.rmtree(folder)
    failures = [answer for answer in found if isinstance(answer, str)]
    if failures:
        raise RuntimeError(failures[0])
    repetitions = zip(*(times for times, _ in found), strict=True)
    seconds = (max(end for _, end in times) - min(start for start, _ in times) for times in repetitions)
    return Result(tuple(seconds), tuple(cpu_s for _, cpu_s in found))


def _replica(
    way: Way,
    replica: int,
    repeat: int,
    folder: Path,
    barrier: Barrier,
    results: "multiprocessing.SimpleQueue[object]",
) -> None:
    torch.set_num_threads(1)
    try:
        results.put(_repeat(way, replica, repeat, folder, barrier))
    except Exception as error:  # noqa: BLE001 - the parent process, which waits for an answer, raises it
        barrier.abort()
        results.put(f"replica {replica}: {type(error).__name__}: {error}")


def _repeat(
    way: Way, replica: int, repeat: int, folder: Path, barrier: Barrier
) -> tuple[list[tuple[float, float]], float]:
    """The start and the end of each repetition, and the processor's seconds of all."""
    files, links = FileStorage(folder), way.links
    store = Throttled(files, latency_s=links.latency_s, upload=[OwnPace(links.up)], download=[OwnPace(links.down)])
    cancel, threads = threading.Event(), lane_threads()
    channel = Channel(store, ArrivalEstimator(deadline_s=DEADLINE_S), run_key=RUN_KEY, cancel=cancel)
    graph = _graph(way, replica)
    vector = torch.empty(way.gradient_bytes // 4)
    feedback = new_feedback(vector, way.pattern, replica, wire=way.wire)
    times: list[tuple[float, float]] = []
    cpu_s = 0.0
    for step in range(repeat + 1):
        vector.fill_(float(replica + 1))
        doer = Synchronisation(channel, way.pattern, replica, _key_of(step))
        pieces = gradient_chunks(vector, way.pattern, wire=way.wire, feedback=feedback)

        def run_task(task: Task, doer: Synchronisation = doer, pieces: GradientChunks = pieces) -> TaskResult:
            moves = task.kind in SIDE_BY_SIDE or task.kind is Kind.MERGE
            return doer.run(task, pieces) if moves else TaskResult()

        if replica == 0 and step > 1:  # all have read what was there two steps ago
            for key in files.list(f"{step - 2}/"):
                files.delete(key)
        barrier.wait(timeout=DEADLINE_S)
        if step == 1:
            cpu_s = time.process_time()
        channel.begin_step()
        start_s = time.monotonic()
        execute(
            graph,
            run_task,
            step=step,
            cancel=cancel,
            threads=threads,
            open_requests={Resource.UPLOAD: links.open_uploads, Resource.DOWNLOAD: links.open_downloads},
            clock=time.monotonic,
        )
        if step:
            times.append((start_s, time.monotonic()))
        expected = float(way.replicas * (way.replicas + 1) // 2)
        if not bool((vector == expected).all()):
            raise AssertionError(f"the sum is {vector.min()} to {vector.max()}, not {expected}")
    return times, time.process_time() - cpu_s


def _key_of(step: int) -> Callable[[Task], str]:
    return lambda put: f"{step}/{put}"


def _graph(way: Way, replica: int) -> Graph:
    return build_graph(sum_shape(way.sync, way.replicas, way.streams)).of_worker(0, replica)


if __name__ == "__main__":
    main()
