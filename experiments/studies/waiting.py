"""What waiting for objects costs: requests, dollars and delays of a step, for fixed intervals and as estimated.

A pipeline with two replicas is executed: lanes and messages are those of training, computations sleep for times that
vary. Every worker has a link of its own, and every request a latency that varies. An object counts as awaited if its
reader wanted it before it was there; *late* is the time from when it could have been asked for until it was. LambdaML
asks for merged gradients every 100 ms.
"""

import argparse
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import torch

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import pattern
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.core import Resource, Routes, ScheduleKind, Streams, Sync, TensorProfile, find_routes
from funcpipe.platforms.base import OPEN as ALWAYS
from funcpipe.platforms.base import Gate, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.throttle import OwnPace, Throttled
from funcpipe.platforms.wrappers import Counted, StorageWrapper
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.lane_rules import SIDE_BY_SIDE
from funcpipe.scheduler.tasks import Kind, Task, source_of
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.run_keys import RUN_KEY
from funcpipe.worker.synchronisation import Synchronisation

STAGES, REPLICAS, MICRO_BATCHES = 3, 2, 8
OPEN_REQUESTS = 4
COMPUTES_S = {Kind.FORWARD: 0.08, Kind.BACKWARD: 0.16}
VARIES = 0.1
LINK_BYTES_S, LATENCY_S, LATENCY_VARIES_S = 70e6, 0.03, 0.01
ACTIVATION, GRADIENT = {"x": torch.zeros(250_000)}, 4_000_000
STREAMS = Streams(rounds=4, groups=1, merged=1)
PATTERN = pattern(Sync.EXCHANGE, REPLICAS, STREAMS)
SIZE = "3072MB"
DEADLINE_S = 60.0
AT_ONCE, TOLD, LEARNED = "at once", "told", "learned"
WAYS: dict[str, float | None] = {AT_ONCE: 0.0, "every 10 ms": 0.01, "every 100 ms": 0.1}


@dataclass
class Log:
    """What all workers note.

    When each object was there; of each read its step, and how late it was, None if the object had not to be awaited;
    of each step of each worker its number, seconds, puts, gets and empty gets.
    """

    came_s: dict[str, float] = field(default_factory=dict)
    late_s: list[tuple[int, float | None]] = field(default_factory=list)
    steps: list[tuple[int, float, int, int, int]] = field(default_factory=list)

    def note_read(self, step: int, key: str, wanted_s: float, found_s: dict[str, float]) -> None:
        """The object `key` was wanted at `wanted_s`, and there when it was asked for at `found_s`."""
        came_s = self.came_s.get(key, found_s[key])
        self.late_s.append((step, max(found_s[key] - came_s, 0.0) if came_s > wanted_s else None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="how many are counted")
    parser.add_argument("--learning", type=int, default=6, help="steps before those from which times are learned")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{STAGES} stages, {REPLICAS} replicas, {MICRO_BATCHES} micro-batches; figures of a step, of all functions\n"
        f"{'asked':>20} {'step s':>7} {'puts':>5} {'gets':>5} {'empty':>6} {'awaited':>7} {'empty/awaited':>13} "
        f"{'late ms':>7} {'requests $':>10} {'functions $':>11}"
    )
    for way in (*WAYS, TOLD, LEARNED):
        learning = options.learning if way == LEARNED else 1
        log = run(way, learning + options.steps)
        if way == LEARNED:
            show(f"{way}, first step", log, range(1))
        show(way, log, range(learning, learning + options.steps))


def run(way: str, steps: int) -> Log:
    """`steps` steps of all workers, each of which asks as `way` says."""
    graph, near, log, cancel = build_graph(shape()), MemoryStorage(), Log(), threading.Event()
    workers = sorted({(task.stage, task.replica) for task in graph.tasks})
    with ThreadPoolExecutor(len(workers)) as pool:
        done = [
            pool.submit(
                Worker(graph, worker, far(near, way, random.Random(f"{worker}")), log, cancel, near.delete).run, steps
            )
            for worker in workers
        ]
        for future in done:
            future.result()
    return log


def shape() -> StepShape:
    tensors = [
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=1, backward_bytes=1)
        for i in range(STAGES - 1)
    ]
    routes: Routes = find_routes(range(STAGES), tensors)
    return StepShape(
        stages=STAGES,
        replicas=REPLICAS,
        micro_batches=MICRO_BATCHES,
        routes=routes,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.EXCHANGE,
        streams=STREAMS,
    )


def far(near: MemoryStorage, way: str, varies: random.Random) -> Storage:
    link = Throttled(near, latency_s=LATENCY_S, upload=[OwnPace(LINK_BYTES_S)], download=[OwnPace(LINK_BYTES_S)])
    return Varying(link, near if way == TOLD else None, WAYS.get(way), varies)


class Varying(StorageWrapper):
    """A link whose latency varies; waits end when `tells` does, or after `interval_s`, or as the reader has learned.

    One that ends too early is asked again, so that an interval is a telling storage that errs.
    """

    def __init__(self, link: Storage, tells: Storage | None, interval_s: float | None, varies: random.Random) -> None:
        super().__init__(link)
        self.watches = tells is not None or interval_s is not None
        self._tells, self._interval_s, self._varies = tells, interval_s, varies

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = ALWAYS) -> None:
        self._vary()
        super().put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = ALWAYS) -> bytes:
        self._vary()
        return super().get(key, start=start, stop=stop, gate=gate)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        if self._tells is not None:
            self._tells.wait(key, timeout_s, cancel)
        else:
            cancel.wait(timeout_s if self._interval_s is None else min(self._interval_s, timeout_s))

    def _vary(self) -> None:
        time.sleep(self._varies.expovariate(1 / LATENCY_VARIES_S))


class Asked(StorageWrapper):
    """Notes of each object when its put ended, and when the get began that found it."""

    def __init__(self, store: Storage, log: Log) -> None:
        super().__init__(store)
        self._log = log
        self.found_s: dict[str, float] = {}

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = ALWAYS) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        self._log.came_s[key] = time.monotonic()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = ALWAYS) -> bytes:
        began_s = time.monotonic()
        data = super().get(key, start=start, stop=stop, gate=gate)
        self.found_s[key] = began_s
        return data


class Worker:
    """One function of the pipeline: its lanes and its channel."""

    def __init__(
        self,
        graph: Graph,
        worker: tuple[int, int],
        store: Storage,
        log: Log,
        cancel: threading.Event,
        forget: Callable[[str], None],
    ) -> None:
        stage, self.replica = worker
        self.graph, self.log, self.cancel = graph.of_worker(stage, self.replica), log, cancel
        self.forget = forget
        self.asked = Asked(store, log)
        self.counted = Counted(self.asked)
        self.channel = Channel(self.counted, ArrivalEstimator(deadline_s=DEADLINE_S), run_key=RUN_KEY, cancel=cancel)
        self.varies = random.Random(f"{worker}")
        self.gradient = torch.zeros(GRADIENT)
        self.threads = lane_threads()

    def run(self, steps: int) -> None:
        for step in range(steps):
            began_s, before = time.monotonic(), self.counted.traffic
            self.channel.begin_step()
            execute(
                self.graph,
                self.doer(step),
                step=step,
                cancel=self.cancel,
                threads=self.threads,
                open_requests=OPEN_REQUESTS,
            )
            for task in self.graph.tasks:  # all have read what was put two steps ago
                if task.kind.is_put and step >= 2:
                    self.forget(key_of(task, step - 2))
            after = self.counted.traffic
            counts = (after.puts - before.puts, after.gets - before.gets, after.empty_gets - before.empty_gets)
            self.log.steps.append((step, time.monotonic() - began_s, *counts))

    def doer(self, step: int) -> Callable[[Task], TaskResult]:
        """What does the tasks of `step`."""
        key_of_put = partial(key_of, step=step)
        synchronisation = Synchronisation(self.channel, PATTERN, self.replica, key_of_put)
        pieces = GradientChunks(self.gradient, PATTERN)

        def move(task: Task) -> TaskResult:
            if task.kind in SIDE_BY_SIDE or task.kind is Kind.MERGE:
                return synchronisation.run(task, pieces)
            if task.kind.is_put:
                return TaskResult(self.channel.put(key_of_put(task), ACTIVATION))
            return TaskResult(self.channel.get(key_of_put(source_of(task))).payload_bytes)

        def do(task: Task) -> TaskResult:
            if task.kind.resource is Resource.COMPUTE:
                time.sleep(COMPUTES_S.get(task.kind, 0.0) * self.varies.uniform(1 - VARIES, 1 + VARIES))
                return TaskResult()
            wanted_s = time.monotonic()
            outcome = move(task)
            if task.kind.is_get:
                self.log.note_read(step, key_of_put(source_of(task)), wanted_s, self.asked.found_s)
            return outcome

        return do


def key_of(put: Task, step: int) -> str:
    return f"s{put.stage}.r{put.replica}/{step}/{put}"


def show(name: str, log: Log, steps: range) -> None:
    """The figures of a step, on average over `steps`."""
    spec = load_spec("aws-lambda")
    size_usd_s = next(size.price_usd_s for size in spec.sizes if size.name == SIZE)
    counted = [entry for entry in log.steps if entry[0] in steps]
    puts, gets, empty = (sum(entry[place] for entry in counted) / len(steps) for place in (2, 3, 4))
    worker_s = sum(entry[1] for entry in counted) / len(steps)
    late_s = [late for step, late in log.late_s if step in steps and late is not None]
    awaited = len(late_s) / len(steps)
    print(
        f"{name:>20} {worker_s / (STAGES * REPLICAS):7.3f} {puts:5.0f} {gets:5.0f} {empty:6.1f} {awaited:7.1f} "
        f"{empty / awaited:13.2f} {mean(late_s) * 1e3:7.1f} "
        f"{puts * spec.price_put_usd + gets * spec.price_get_usd:10.6f} {worker_s * size_usd_s:11.6f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
