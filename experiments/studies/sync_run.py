"""Runs a synchronisation over throttled links: every replica in a process of its own, objects as files.

Links have a bandwidth each way and a latency for every request; with the URL of a real storage they are its own.
"""

import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.studies.sampling import sampled
from experiments.studies.sync_ways import Way
from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import transfers
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.comm.int8_chunks import gradient_chunks, new_feedback
from funcpipe.core import Event, Resource, Routes, ScheduleKind
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.local.throttle import OwnPace, Pace, SharedPace, Throttled
from funcpipe.platforms.wrappers import Counted
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.lane_rules import SIDE_BY_SIDE
from funcpipe.scheduler.tasks import Kind, Task
from funcpipe.testing.run_keys import RUN_KEY
from funcpipe.worker.synchronisation import Synchronisation

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
    threads = lane_threads()
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
            graph,
            run_task,
            step=step,
            cancel=cancel,
            threads=threads,
            open_requests=way.links.open_requests,
            clock=time.monotonic,
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
