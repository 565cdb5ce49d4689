"""Steps that are executed for real, except that tasks only occupy their lanes and links only take their time.

All workers are threads of one process. The lanes, the waiting and the messages are those of training; a computation
sleeps, and the storage sleeps for its latency and for the bytes that a message stands for. As in the simulator,
requests of a synchronisation wait for their latency side by side, and all others while they have their lane.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.core import Event, Source, Trace
from funcpipe.platforms.base import OPEN as AT_ONCE
from funcpipe.platforms.base import Gate
from funcpipe.platforms.wrappers import StorageWrapper
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.lane_rules import SIDE_BY_SIDE
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.tasks import Task, source_of
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.run_keys import RUN_KEY

MESSAGE = {"x": torch.zeros(1)}
DEADLINE_S = 60.0
OPEN_REQUESTS = 16
LONGEST_PAUSE_S = 0.002  # looking costs nothing here, and what it misses is not what is tried


def run(graph: Graph, cost: Callable[[Task], Cost], *, steps: int) -> Trace:
    """`steps` steps one after the other, each begun by all workers together."""
    storage = MemoryStorage()
    workers = sorted({(task.stage, task.replica) for task in graph.tasks})
    together = threading.Barrier(len(workers), timeout=DEADLINE_S)
    cancel = threading.Event()

    def work(worker: tuple[int, int]) -> list[Event]:
        part = graph.of_worker(*worker)
        lanes = _Lanes(storage, cost, cancel)
        found: list[Event] = []
        with lane_threads() as threads:
            for step in range(steps):
                together.wait()
                do = lanes.of_step(step)
                found += execute(part, do, step=step, cancel=cancel, threads=threads, open_requests=OPEN_REQUESTS)
        return found

    with ThreadPoolExecutor(len(workers)) as pool:
        events = [event for found in pool.map(work, workers) for event in found]
    return Trace(run="synthetic", source=Source.EXECUTED, events=tuple(sorted(events, key=lambda e: e.start_s)))


class _Lanes:
    """What a worker's tasks do: nothing, for as long as they take."""

    def __init__(self, storage: MemoryStorage, cost: Callable[[Task], Cost], cancel: threading.Event) -> None:
        self._cost = cost
        self._slow = _Slow(storage)
        self._channel = Channel(
            self._slow, ArrivalEstimator(deadline_s=DEADLINE_S, most_s=LONGEST_PAUSE_S), run_key=RUN_KEY, cancel=cancel
        )

    def of_step(self, step: int) -> Callable[[Task], TaskResult]:
        """What does the tasks of `step`."""

        def do(task: Task) -> TaskResult:
            cost = self._cost(task)
            body_s = cost.payload_bytes / cost.link_bytes_s if cost.link_bytes_s else 0.0
            if not (task.kind.is_put or task.kind.is_get):
                time.sleep(cost.seconds + body_s)
                return TaskResult()
            key = f"{step}/{task if task.kind.is_put else source_of(task)}"
            is_open = task.kind in SIDE_BY_SIDE
            takes_s = (cost.seconds, body_s) if is_open else (0.0, cost.seconds + body_s)
            self._slow.takes_s[key, task.kind.is_put] = takes_s
            if task.kind.is_put:
                if is_open:
                    self._channel.put_series(key, (MESSAGE,))
                else:
                    self._channel.put(key, MESSAGE)
                return TaskResult(round(cost.payload_bytes))
            return TaskResult(round(cost.payload_bytes), self._channel.get(key).waited_s)

        return do


class _Slow(StorageWrapper):
    """A storage whose requests, puts or not, take what `takes_s` names by key: seconds before the gate, and within."""

    def __init__(self, store: MemoryStorage) -> None:
        super().__init__(store)
        self.takes_s: dict[tuple[str, bool], tuple[float, float]] = {}

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = AT_ONCE) -> None:
        before_s, within_s = self.takes_s[key, True]
        time.sleep(before_s)
        with gate:
            time.sleep(within_s)
            self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = AT_ONCE) -> bytes:
        data = self._store.get(key, start=start, stop=stop)
        before_s, within_s = self.takes_s[key, False]
        time.sleep(before_s)
        with gate:
            time.sleep(within_s)
        return data
