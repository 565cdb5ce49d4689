"""One client that starts and follows many functions: requests a second, processor share, memory; `status`, `watch`.

Functions are simulated: one thread writes what they write, heartbeats and the losses of steps, into memory; its
processor time is not counted. Requests to storage are, and take LATENCY_S each; a listing takes as many as it has
pages. The platform's launch rate is that of AWS Lambda.

    python -m experiments.studies.following --functions 100 1000
"""

import argparse
import contextlib
import functools
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from funcpipe.client.control.status import status
from funcpipe.client.control.watching import Watcher
from funcpipe.client.follow.launch import begin, start
from funcpipe.client.follow.results import Progress
from funcpipe.client.follow.steps import follow
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import (
    LIST_KEYS,
    FaultTolerance,
    Heartbeat,
    Invocation,
    LeaseDocument,
    Plan,
    PlatformSpec,
    RunSettings,
    ScheduleKind,
    StepReport,
    Sync,
    Wire,
    WorkerSpec,
)
from funcpipe.core.logs import RawLine
from funcpipe.model.graph import trace
from funcpipe.platforms.base import Handle, PlainKeys, Platform, State, Status, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.wrappers import Answer, StorageWrapper
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import owned
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.recipe import Recipe
from tests.support.plans import even_stages
from tests.support.run_keys import remembered_keys

LATENCY_S = 0.02
STAGES = 4
RUN = "followed"
LOOKS, LOOK_EVERY_S = 6, 5.0


class Slow(StorageWrapper):
    """Counts the requests to `store`, each of which takes LATENCY_S, and each page of a listing."""

    def __init__(self, store: Storage) -> None:
        super().__init__(store)
        self.watches = False
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        answer = request()
        pages = max(-(-len(answer) // LIST_KEYS), 1) if what.startswith("list") else 1  # type: ignore[arg-type]
        with self._lock:
            self.asked[what.split()[0]] += pages
        time.sleep(pages * LATENCY_S)
        return answer


@dataclass
class Simulated(PlainKeys):
    """A platform whose functions are written for by a `Writer`: they run until they are stopped."""

    spec: PlatformSpec
    url: str = "simulated://here"
    started: dict[str, WorkerSpec] = field(default_factory=dict)

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Run any plan."""

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function."""
        assert isinstance(worker, WorkerSpec)
        time.sleep(LATENCY_S)
        self.started[worker.worker] = worker
        return Handle(worker=worker.worker, name=worker.worker)

    def status(self, handle: Handle) -> Status:
        """Say that a function runs."""
        return Status(state=State.RUNNING if handle.name in self.started else State.DONE)

    def stop(self, handle: Handle) -> None:
        """End a function."""
        self.started.pop(handle.name, None)

    def logs(self, run: str) -> tuple[RawLine, ...]:
        """Keep none."""
        return ()

    def detach(self) -> None:
        """Let functions run on."""

    def open(self, url: str) -> Platform:
        """Open this platform."""
        return self


class Writer:
    """Writes what the functions of a run write, in a thread: a heartbeat of each in `heartbeat_s`, and losses."""

    def __init__(
        self, storage: Storage, platform: Simulated, *, replicas: int, heartbeat_s: float, step_s: float
    ) -> None:
        self._storage, self.platform, self._replicas = signed(storage), platform, replicas
        self._heartbeat_s, self._step_s = heartbeat_s, step_s
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self.processor_s = 0.0

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due: dict[str, float] = {}
        numbers: Counter[str] = Counter()
        step, step_at_s = 0, None
        while not self._stop.wait(0.05):
            now_s = time.monotonic()
            for worker, spec in list(self.platform.started.items()):
                if worker not in due:
                    put_document(self._storage, Keys.of(spec).lease(worker, 0), LeaseDocument(holder=worker))
                if now_s >= due.get(worker, now_s):
                    due[worker] = now_s + self._heartbeat_s
                    numbers[worker] += 1
                    put_document(self._storage, Keys.of(spec).heartbeat(worker, 0), self._beat(worker, numbers[worker]))
            if len(due) == STAGES * self._replicas and step_at_s is None:
                step_at_s = now_s + self._step_s
            if step_at_s is not None and now_s >= step_at_s:
                self._end_step(step)
                step, step_at_s = step + 1, step_at_s + self._step_s
            self.processor_s = time.thread_time()

    def _beat(self, worker: str, number: int) -> Heartbeat:
        return Heartbeat(
            worker=worker,
            attempt=0,
            beat=number,
            step=0,
            steps=100,
            alive_s=1.0,
            step_s=self._step_s,
            memory_bytes=900 << 20,
            memory_mb=1024,
            spent_usd=0.1,
            run_usd=0.1,
            run_s=1.0,
            sent_at_s=time.time(),
        )

    def _end_step(self, step: int) -> None:
        for replica in range(self._replicas):
            name = f"s{STAGES - 1}.r{replica}"
            if (spec := self.platform.started.get(name)) is not None:
                report = StepReport(step=step, samples=1, loss_sum=1.0)
                put_document(self._storage, Keys.of(spec).step_report(step, name), report)


def job(functions: int, spec: PlatformSpec) -> Job:
    """Return a job on so many functions."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(STAGES)))
    graph, replicas = trace(model, (torch.zeros(1, 4),)), functions // STAGES
    plan = Plan(
        global_batch=replicas,
        micro_batch=1,
        replicas=replicas,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform=spec.name,
        stages=even_stages([layer.name for layer in graph.layers], STAGES),
    )
    return Job(
        graph=graph,
        plan=plan,
        recipe=Recipe(loss=nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1)),
        dataset=functools.partial(samples, replicas),
        samples=replicas,
        epochs=100,
        seed=0,
        shuffle=False,
        message_deadline_s=600.0,
        prices=spec,
    )


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return so many samples."""
    return [(torch.zeros(4), torch.zeros(4)) for _ in range(count)]


def memory_mb() -> float:
    """Return the most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _SeenEnoughError(Exception):
    """The client has followed for long enough."""


def measure(functions: int, *, seconds: float, step_s: float) -> None:
    """Start so many functions, follow them for so many `seconds`, ask for their status, and print what that takes."""
    spec = replace(load_spec("local"), launches_10s=load_spec("aws-lambda").launches_10s, max_functions=functions)
    objects = MemoryStorage()
    storage, platform, faults = Slow(objects), Simulated(spec), FaultTolerance()
    ready = prepare(
        job(functions, spec),
        session_on(Site(platform, storage, "memory://"), reopen=platform.open),
        faults=faults,
        settings=RunSettings(name=RUN),
    )
    writer = Writer(objects, platform, replicas=functions // STAGES, heartbeat_s=faults.heartbeat_s, step_s=step_s)
    with writer, owned(ready.storage, RUN) as owner:
        fenced, keys = begin(ready, owner.storage)
        supervisor = Supervisor(
            platform,
            fenced.storage,
            keys,
            prices=spec,
            account=ready.account,
            check_owner=owner.check_now,
            meter=ready.meter,
        )
        with contextlib.suppress(_SeenEnoughError), supervisor:
            seen = Follower(storage, writer, seconds)
            record = start(fenced, keys, supervisor)
            launched_s = time.monotonic() - seen.began_s
            launched = storage.asked.total() - seen.asked.total()
            print(f"\n{functions} functions: started in {launched_s:.1f} s with {launched} requests")
            seen.begin()
            follow(fenced, record, supervisor, seen, owner)


class Follower:
    """Ends the following after so many `seconds`, prints its cost, and asks for the run's status."""

    def __init__(self, storage: Slow, writer: Writer, seconds: float) -> None:
        self._storage, self._writer, self._seconds = storage, writer, seconds
        self._steps = 0
        self._memory_mb = memory_mb()
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.asked, self.began_s = Counter(self._storage.asked), time.monotonic()
        self._processor_s = time.process_time() - self._writer.processor_s

    def __call__(self, progress: Progress) -> None:
        self._steps += 1
        taken_s = time.monotonic() - self.began_s
        if taken_s < self._seconds:
            return
        asked = self._storage.asked - self.asked
        processor_s = time.process_time() - self._writer.processor_s - self._processor_s
        said = ", ".join(f"{count / taken_s:.2f} {kind}" for kind, count in sorted(asked.items()))
        rate, more_mb = asked.total() / taken_s, memory_mb() - self._memory_mb
        print(
            f"  followed for {taken_s:.0f} s, {self._steps} steps: {rate:.2f} requests a second ({said}), "
            f"{processor_s / taken_s:.1%} of a core, {memory_mb():.0f} MB, {more_mb:.0f} MB more than before"
        )
        before, began_s, processor_s = Counter(self._storage.asked), time.monotonic(), time.process_time()
        writer_s = self._writer.processor_s
        found = status(self._storage, RUN, self._writer.platform.open)
        taken_s, asked = time.monotonic() - began_s, self._storage.asked - before
        processor_s = time.process_time() - processor_s - self._writer.processor_s + writer_s
        states = Counter(worker.state.value for worker in found.workers)
        print(
            f"  status: {taken_s:.2f} s with {asked.total()} requests, {processor_s:.2f} processor seconds: "
            f"{found.verdict.value}, {dict(states)}"
        )
        self._watch()
        raise _SeenEnoughError

    def _watch(self) -> None:
        """Look at the run several times, as `funcpipe run watch` does."""
        watcher = Watcher(self._storage, RUN, self._writer.platform.open)
        for _ in range(1 + LOOKS):
            before, began_s = Counter(self._storage.asked), time.monotonic()
            view = watcher.poll()
            taken_s, asked = time.monotonic() - began_s, self._storage.asked - before
            print(
                f"  look: {taken_s:.2f} s with {asked.total()} requests: {view.status.verdict.value}, step {view.done}"
            )
            time.sleep(LOOK_EVERY_S)


def main(given: Sequence[str] | None = None) -> None:
    """Measure runs of so many functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-s", type=float, default=5.0)
    options = parser.parse_args(given)
    with remembered_keys():
        for functions in options.functions:
            measure(functions, seconds=options.seconds, step_s=options.step_s)


if __name__ == "__main__":
    main()
