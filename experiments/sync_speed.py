"""Measures synchronisation over throttled links in real processes, and compares it with closed forms and the limit.

Every replica is a process whose link has a bandwidth each way and a latency for every request; objects are files. Each
algorithm is run several times; given is the median time from the common start to the end of the slowest replica.
``--lanes`` draws what moves when. With ``--wire-sync fp32 bf16`` each is run in both formats, one after the other; the
last column is its time as a share of that in the first one:

    python -m experiments.sync_speed --replicas 4 --megabytes 64 --ways fastest pipelined --wire-sync fp32 bf16
"""

import argparse
import itertools
import json
import math
import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experiments.sampling import sampled, show
from experiments.sync_picture import draw
from experiments.sync_ways import WAYS, Way, ways
from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import open_downloads, transfers
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.comm.int8_chunks import gradient_chunks, new_feedback
from funcpipe.core import SYNC_WIRES, Event, Resource, Routes, ScheduleKind, Wire
from funcpipe.partitioner.cost.sync_time import limit_s
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.local.throttle import OwnPace, Pace, SharedPace, Throttled
from funcpipe.platforms.wrappers import Counted
from funcpipe.scheduler.execute import TaskResult, execute
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.lane_rules import SIDE_BY_SIDE
from funcpipe.scheduler.tasks import Kind, Task
from funcpipe.testing.run_keys import RUN_KEY
from funcpipe.worker.synchronisation import Synchronisation
from tests.partitioner.sync_links import Links, duration_s

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Result:
    """Seconds of each repetition; of each replica the processor's seconds, requests and bytes of all repetitions.

    `places` says where the threads were that did not wait, with a real storage.
    """

    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    traffic: tuple[tuple[int, int, int, int, int], ...]
    events: tuple[Event, ...]
    places: Counter[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--wire-sync", nargs="+", choices=[wire.value for wire in SYNC_WIRES], default=["fp32"])
    parser.add_argument("--store", help="the URL of a real storage, to be measured unthrottled instead")
    parser.add_argument("--mb-per-s", type=float, default=35.0)
    parser.add_argument("--latency-ms", type=float, default=40.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--lanes", type=Path, help="draw the lanes of the last repetitions into this file")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    rate = options.mb_per_s * 1e6
    rows: list[dict[str, object]] = []
    pictures: dict[str, tuple[Event, ...]] = {}
    print(" n   MB  way                   formula s  played s  measured s  measured/formula  measured/limit  by first")
    for replicas in options.replicas:
        links = Links(rate, rate, options.latency_ms / 1e3, open_downloads(replicas))
        for megabytes in options.megabytes:
            asked = (options.ways, replicas, megabytes * 1_000_000, links)
            for same in zip(*(ways(*asked, Wire(wire)) for wire in options.wire_sync), strict=True):
                results = {str(way): run(replace(way, store=options.store), options.repeat) for way in same}
                rows += show_all(same, list(results.values()))
                pictures |= {name: result.events for name, result in results.items()}
    if options.lanes:
        draw(pictures, options.lanes)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def show_all(same: Sequence[Way], results: Sequence[Result]) -> list[dict[str, object]]:
    """Print a line for each format in which a way was measured."""
    rows = [figures(way, result, results[0]) for way, result in zip(same, results, strict=True)]
    for row, result in zip(rows, results, strict=True):
        print(
            f"{row['replicas']:2} {int(str(row['gradient_bytes'])) // 10**6:4}  {row['way']!s:23} "
            f"{row['formula_s']:7.3f} {row['played_s']:9.3f} {row['measured_s']:11.3f} {row['measured/formula']:17.3f} "
            f"{row['measured/limit']:15.3f} {row['measured/first']:9.3f}",
            flush=True,
        )
        if result.places:
            print(show(result.places), flush=True)
    return rows


def figures(way: Way, result: Result, first: Result) -> dict[str, object]:
    """The figures of a way in one format, beside the result in the first one. The limit includes two latencies."""
    measured_s = statistics.median(result.seconds)
    least_s = float(limit_s(way.sent_bytes, way.replicas, way.links.up, way.links.down, way.links.latency_s))
    repeats = len(result.seconds)
    return {
        "way": str(way),
        "replicas": way.replicas,
        "gradient_bytes": way.gradient_bytes,
        "wire": way.wire.value,
        "formula_s": way.formula_s,
        "played_s": math.nan if way.server_bytes_s is not None else duration_s(way.pattern, way.sent_bytes, way.links),
        "measured_s": measured_s,
        "measured/formula": measured_s / way.formula_s,
        "measured/limit": measured_s / least_s,
        "measured/first": measured_s / statistics.median(first.seconds),
        "all_s": result.seconds,
        "cpu_s_each": statistics.mean(result.cpu_s) / repeats,
        "puts_gets_empty_sent_received_each": [statistics.mean(c) / repeats for c in zip(*result.traffic, strict=True)],
    }


def run(way: Way, repeat: int) -> Result:
    """Every replica in a process of its own, `repeat` times and once to warm up."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(way.pattern.workers), context.SimpleQueue()
    processes = [
        context.Process(target=_replica, args=(way, replica, repeat, folder, barrier, results))
        for replica in range(way.pattern.workers)
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
        if way.store is not None:
            _delete(_unthrottled(way, folder), f"{folder.name}/")
    failures = [answer for answer in found if isinstance(answer, str)]
    if failures:
        raise RuntimeError(failures[0])
    starts = [[start for start, _ in times] for times, *_ in found]
    ends = [[end for _, end in times] for times, *_ in found]
    seconds = tuple(
        max(end) - min(start) for start, end in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)
    )
    _, cpu_s, traffic, events, places = zip(*found, strict=True)
    return Result(seconds, cpu_s, traffic, tuple(itertools.chain(*events)), sum(places, Counter()))


def _replica(
    way: Way,
    replica: int,
    repeat: int,
    folder: Path,
    barrier: "multiprocessing.synchronize.Barrier",
    results: "multiprocessing.SimpleQueue[object]",
) -> None:
    torch.set_num_threads(1)
    try:
        with sampled() if way.store is not None else nullcontext(Counter[str]()) as places:
            found = _repeat(way, replica, repeat, folder, barrier)
        results.put((*found, places))
    except Exception as error:  # noqa: BLE001 - told by the parent process, which waits for an answer
        barrier.abort()
        results.put(f"replica {replica}: {type(error).__name__}: {error}")


def _repeat(
    way: Way, replica: int, repeat: int, folder: Path, barrier: "multiprocessing.synchronize.Barrier"
) -> tuple[list[tuple[float, float]], float, tuple[int, int, int, int, int], tuple[Event, ...]]:
    store = Counted(_store(way, replica, folder))
    cancel = threading.Event()
    channel = Channel(store, ArrivalEstimator(deadline_s=DEADLINE_S), run_key=RUN_KEY, cancel=cancel)
    graph = _graph(way, replica)
    vector = torch.empty(way.gradient_bytes // 4)
    times: list[tuple[float, float]] = []
    events: tuple[Event, ...] = ()
    cpu_s, before = 0.0, store.traffic
    feedback = new_feedback(vector, way.pattern, replica, wire=way.wire)
    for step in range(repeat + 1):
        vector.fill_(float(replica + 1) if replica < way.replicas else 0.0)
        doer = Synchronisation(channel, way.pattern, replica, _key_of(folder.name, step))
        pieces = gradient_chunks(vector, way.pattern, wire=way.wire, feedback=feedback)

        def run_task(task: Task, doer: Synchronisation = doer, pieces: GradientChunks = pieces) -> TaskResult:
            if task.kind in (Kind.BUCKET, Kind.BACKWARD):
                time.sleep(way.backward_s / way.pattern.streams.rounds)
            moves = task.kind in SIDE_BY_SIDE or task.kind is Kind.MERGE
            return doer.run(task, pieces) if moves else TaskResult()

        if replica == 0 and step > 1:  # all have read what was there two steps ago
            _delete(_unthrottled(way, folder), f"{folder.name}/{step - 2}/")
        barrier.wait(timeout=DEADLINE_S)
        if step == 1:
            cpu_s, before = time.process_time(), store.traffic
        channel.begin_step()
        start_s = time.monotonic()
        events = execute(
            graph, run_task, step=step, cancel=cancel, open_requests=way.links.open_requests, clock=time.monotonic
        )
        if step:
            times.append((start_s, time.monotonic()))
        _require_sum(vector, way.replicas)
    after = store.traffic
    counts = tuple(
        getattr(after, name) - getattr(before, name)
        for name in ("puts", "gets", "empty_gets", "sent_bytes", "received_bytes")
    )
    return (
        times,
        time.process_time() - cpu_s,
        counts,
        tuple(e for e in events if e.lane in (Resource.UPLOAD, Resource.DOWNLOAD)),
    )


def _unthrottled(way: Way, folder: Path) -> Storage:
    return FileStorage(folder) if way.store is None else open_storage(way.store)


def _delete(store: Storage, prefix: str) -> None:
    for key in store.list(prefix):
        store.delete(key)


def _key_of(run: str, step: int) -> Callable[[Task], str]:
    return lambda put: f"{run}/{step}/{put}"


def _graph(way: Way, replica: int) -> Graph:
    if way.server_bytes_s is not None:
        moves = transfers(way.pattern, replica)
        tasks = tuple(Task(Kind(move.move.value), 0, replica, peer=move.peer, part=move.part) for move in moves)
        return Graph(tasks, tuple(move.after for move in moves))
    shape = StepShape(
        stages=1,
        replicas=way.replicas,
        micro_batches=way.replicas,
        routes=Routes(activations=(), gradients=()),
        schedule=ScheduleKind.GPIPE,
        sync=way.sync,
        streams=way.streams,
    )
    return build_graph(shape).of_worker(0, replica)


def _store(way: Way, replica: int, folder: Path) -> Storage:
    """A server has its objects in its own memory; the others reach them through their links and through its."""
    plain, links = _unthrottled(way, folder), way.links
    if way.store is not None:
        return plain
    upload: list[Pace] = [OwnPace(links.up)]
    download: list[Pace] = [OwnPace(links.down)]
    if way.server_bytes_s is not None:
        if replica == way.replicas:
            return plain
        upload.append(SharedPace(way.server_bytes_s, folder / "upload"))
        download.append(SharedPace(way.server_bytes_s, folder / "download"))
    return Throttled(plain, latency_s=links.latency_s, upload=upload, download=download)


def _require_sum(vector: torch.Tensor, replicas: int) -> None:
    expected = float(replicas * (replicas + 1) // 2)
    if not bool((vector == expected).all()):
        raise AssertionError(f"the sum is {vector.min()} to {vector.max()}, not {expected}")


if __name__ == "__main__":
    main()
