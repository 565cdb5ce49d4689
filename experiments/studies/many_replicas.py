"""Many replicas sum small vectors as threads of one process, beside the simulator: every sum is checked.

Their storage is this process's memory, behind a latency, and takes so many requests a second below each prefix; it
refuses others as S3 does (`testing.limited_storage`), and they are made again. Each step begins at a barrier. The first
steps teach the replicas when to ask (`comm.arrival_estimator`), so the last of them count.

    python -m experiments.studies.many_replicas --replicas 128 --ways tree hierarchical --latency-s 1
    python -m experiments.studies.many_replicas --replicas 128 --ways tree hierarchical --latency-s 0.2 --requests-s 20
"""

import argparse
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from funcpipe.analysis.predict import forecast
from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import pattern
from funcpipe.comm.int8_chunks import gradient_chunks
from funcpipe.core import ModelProfile, Plan, PlatformSpec, Streams, Sync, SyncWay
from funcpipe.core.texts import spread_prefix
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.cost.waits import crowd_time_s
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.throttle import Throttled
from funcpipe.platforms.wrappers import PAUSES, Retried
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import build_graph
from funcpipe.scheduler.tasks import SIDE_BY_SIDE, Kind, Task, open_requests
from funcpipe.testing.limited_storage import LimitedStorage
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.synchronisation import Synchronisation
from tests.analysis.test_predict import summing
from tests.support.plans import sum_shape
from tests.support.run_keys import RUN_KEY

DEADLINE_S = 300.0
WAYS = {
    "tree": SyncWay(Sync.TREE, Streams(1, 11, 1)),
    "tree-4": SyncWay(Sync.TREE, Streams(4, 4, 4)),
    "hierarchical": SyncWay(Sync.HIERARCHICAL, Streams(1, 1, 1)),
    "streamed": SyncWay(Sync.STREAMED, Streams(1, 1, 1)),
}


class Telling(Throttled):
    """A slow storage that tells of new objects."""

    def __init__(self, store: Storage, *, latency_s: float, there: defaultdict[str, threading.Event]) -> None:
        super().__init__(store, latency_s=latency_s)
        self.watches = True
        self._there = there

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        self._there[key].set()

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        self._there[key].wait(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is summed, by how many replicas, and what its storage is like."""

    way: SyncWay
    replicas: int
    elements: int
    latency_s: float
    requests_s: float | None
    steps: int
    tells: bool

    @property
    def spec(self) -> PlatformSpec:
        """The platform for the simulator."""
        spec = load_spec("aws-lambda")
        return replace(
            spec,
            latency_s=self.latency_s,
            puts_s=self.requests_s,
            gets_s=self.requests_s,
            requests_s=None,
            polled=not self.tells,
        )

    @property
    def summing(self) -> tuple[Plan, ModelProfile]:
        """Return a plan that does nothing else, and its profile."""
        return summing(4 * self.elements, self.replicas, self.way)

    @property
    def crowd_s(self) -> float | None:
        """The seconds in which the storage takes all requests."""
        return crowd_time_s(self.summing[0], self.spec)

    @property
    def simulated_s(self) -> float:
        """The seconds of a step in the simulator."""
        return forecast(*self.summing, self.spec).duration_s

    @property
    def form_s(self) -> float:
        """The seconds of a step by the closed form."""
        return evaluate(*self.summing, self.spec).iteration_s


def executed(setting: Setting) -> tuple[list[float], LimitedStorage, float]:
    """Return the seconds of each step, from the barrier to the end of the last replica; the storage; and the seconds of
    the processor. Raises AssertionError for a sum that is not exact.
    """
    limited = LimitedStorage(
        MemoryStorage(),
        puts_s=setting.requests_s,
        gets_s=setting.requests_s,
        burst_s=0.1,
        prefix_of=lambda key: key.partition("/")[0],
    )
    ends_s: list[list[float]] = [[] for _ in range(setting.replicas)]
    begins_s: list[float] = []
    failures: list[BaseException] = []
    there = defaultdict[str, threading.Event](threading.Event) if setting.tells else None
    barrier = threading.Barrier(setting.replicas, action=lambda: begins_s.append(time.monotonic()))

    def run(replica: int) -> None:
        try:
            _steps(setting, replica, limited, barrier, ends_s[replica], there)
        except BaseException as error:  # noqa: BLE001 - it is raised in the main thread
            failures.append(error)
            barrier.abort()

    began_s = time.process_time()
    threads = [threading.Thread(target=run, args=(replica,)) for replica in range(setting.replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((one for one in failures if not isinstance(one, threading.BrokenBarrierError)), failures[0])
    seconds = [max(ends) - begin_s for begin_s, ends in zip(begins_s, zip(*ends_s, strict=True), strict=False)]
    return seconds, limited, time.process_time() - began_s


def _steps(
    setting: Setting,
    replica: int,
    limited: Storage,
    barrier: threading.Barrier,
    ends_s: list[float],
    there: defaultdict[str, threading.Event] | None,
) -> None:
    way, cancel, threads = setting.way, threading.Event(), lane_threads()
    link = (
        Throttled(limited, latency_s=setting.latency_s)
        if there is None
        else Telling(limited, latency_s=setting.latency_s, there=there)
    )
    store = Retried(link, deadline_s=DEADLINE_S, backoff=replace(PAUSES, crowd_s=setting.crowd_s))
    channel = Channel(store, ArrivalEstimator(deadline_s=DEADLINE_S), run_key=RUN_KEY, cancel=cancel)
    chosen = pattern(way.sync, setting.replicas, way.streams)
    graph = build_graph(sum_shape(way.sync, setting.replicas, way.streams)).of_worker(0, replica)
    vector = torch.empty(setting.elements)
    for step in range(setting.steps):
        vector.fill_(float(replica + 1))
        pieces = gradient_chunks(vector, chosen)

        def key_of(put: Task, step: int = step) -> str:
            return f"{spread_prefix(f's0.r{put.replica}')}/{step}/{put}"

        doer = Synchronisation(channel, chosen, replica, key_of)

        def run_task(task: Task, doer: Synchronisation = doer, pieces: object = pieces) -> TaskResult:
            moves = task.kind in SIDE_BY_SIDE or task.kind is Kind.MERGE
            return doer.run(task, pieces) if moves else TaskResult()  # type: ignore[arg-type]

        barrier.wait(timeout=DEADLINE_S)
        channel.begin_step()
        execute(
            graph,
            run_task,
            step=step,
            cancel=cancel,
            threads=threads,
            open_requests=open_requests(setting.replicas),
            clock=time.monotonic,
        )
        ends_s.append(time.monotonic())
        expected = float(setting.replicas * (setting.replicas + 1) // 2)
        assert bool((vector == expected).all()), f"replica {replica}: {vector.min()} to {vector.max()}, not {expected}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=128)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["tree", "hierarchical"])
    parser.add_argument("--elements", type=int, default=4096)
    parser.add_argument("--latency-s", type=float, default=1.0)
    parser.add_argument("--requests-s", type=float, help="of each prefix, puts and gets alike; without it any number")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tells", action="store_true", help="the storage tells of new objects")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("funcpipe").setLevel(logging.ERROR)  # of each request that is refused
    print("way             form s  simulated s  executed s  by it  steps …  processor s  served  refused")
    for name in options.ways:
        setting = Setting(
            way=WAYS[name],
            replicas=options.replicas,
            elements=options.elements,
            latency_s=options.latency_s,
            requests_s=options.requests_s,
            steps=options.steps,
            tells=options.tells,
        )
        seconds, storage, processor_s = executed(setting)
        found_s, simulated_s = median(seconds[len(seconds) // 2 :]), setting.simulated_s
        served, refused = sum(storage.served.values()), sum(storage.refused.values())
        print(
            f"{name:14} {setting.form_s:7.3f}  {simulated_s:11.3f} {found_s:11.3f} {found_s / simulated_s:6.2f}  "
            f"{' '.join(f'{one:.2f}' for one in seconds)}  {processor_s:.1f}  {served}  {refused}",
            flush=True,
        )


if __name__ == "__main__":
    main()
