"""Two hundred runs in which things go wrong: each must end with the very bits of an undisturbed one, or say why not.

A job of 3 stages x 2 replicas is trained over functions that are threads; faults and their moments are drawn by seed.
"""

import argparse
import functools
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.cuts import even_stages
from experiments.faults import STORAGE_FAULTS, Fate, Fault, Faulty, Threads
from funcpipe.client.job import Job
from funcpipe.client.launch import OnProgress, ignore_progress, launch, launch_detached
from funcpipe.client.prepare import PreparedRun, prepare
from funcpipe.client.results import Progress, RunResult
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, Plan, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.errors import FuncPipeError
from funcpipe.model.graph import trace
from funcpipe.platforms.base import Platform, State
from funcpipe.platforms.catalog import load_spec, open_platform
from funcpipe.platforms.wrappers import Retried
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage

STAGES, REPLICAS, SAMPLES, EPOCHS = 3, 2, 24, 3
DEADLINE_S = 60.0
REQUESTS = 400
"""About so many storage requests does a worker make; faults strike before."""

RUN = "chaos"
FAULTS = FaultTolerance(heartbeat_s=0.15, lease_s=0.45, start_s=1.0, checkpoint_steps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended: `outcome` is "same bits", or the error's name."""

    seed: int
    fault: Fault
    outcome: str
    seconds: float
    restarts: int
    error: str = ""
    left_objects: int = 0
    left_functions: int = 0


def model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(6, generator=draw), torch.tensor(i % 4)) for i in range(SAMPLES)]


def job() -> Job:
    made = model()
    graph = trace(made, (torch.zeros(2, 6),))
    plan = Plan(
        global_batch=8,
        micro_batch=2,
        replicas=REPLICAS,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages([layer.name for layer in graph.layers], STAGES),
    )
    return Job(
        graph=graph,
        plan=plan,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        dataset=data,
        samples=SAMPLES,
        epochs=EPOCHS,
        seed=0,
        shuffle=True,
        message_deadline_s=DEADLINE_S / 3,
        prices=load_spec("local"),
    )


def run(seed: int, fault: Fault, expected: dict[str, Tensor] | None) -> tuple[Ending, dict[str, Tensor] | None]:
    """One run; its ending, and what it trained."""
    draw, objects, began_s = random.Random(seed), MemoryStorage(), time.monotonic()
    storage = Faulty(objects, fault, seed) if fault in STORAGE_FAULTS else objects
    platform = threads(storage, fault, draw)
    error, restarts, tensors = "", 0, None
    try:
        ways: dict[Fault, Callable[..., RunResult]] = defaultdict(lambda: train)
        ways |= {Fault.CLIENT: killed_client, Fault.ORPHAN: left_alone}
        result = ways[fault](Retried(storage), platform, draw)
        tensors, restarts = result.state_dict(), result.bill.functions - STAGES * REPLICAS
    except FuncPipeError as caught:
        error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    finally:
        platform.stop_all()
    same = tensors is not None and (expected is None or _equal(tensors, expected))
    outcome = "same bits" if same else ("OTHER BITS" if tensors is not None else error.partition(":")[0])
    if error:
        for key in objects.list(f"{RUN}/"):
            objects.delete(key)  # what `funcpipe clean` does once the functions have ended
    ending = Ending(
        seed=seed,
        fault=fault,
        outcome=outcome,
        seconds=time.monotonic() - began_s,
        restarts=restarts,
        error=error,
        left_objects=len(objects.list("")),
        left_functions=sum(thread.name.startswith("function ") for thread in threading.enumerate()),
    )
    return ending, tensors


def train(
    storage: Any, platform: Threads, draw: random.Random, *, on_progress: OnProgress = ignore_progress
) -> RunResult:
    return launch(prepared(storage, platform, RunSettings(name=RUN)), on_progress)


def resume(storage: Any, platform: Threads, *, before: Threads) -> RunResult:
    """Go on with the run, whose functions ran on `before`."""
    return launch(prepared(storage, platform, RunSettings(resume=RUN), reopen=before.open))


def prepared(
    storage: Any, platform: Threads, settings: RunSettings, *, reopen: Callable[[str], Platform] = open_platform
) -> PreparedRun:
    session = session_on(Site(platform, storage, "memory://here"), reopen=reopen)
    return prepare(job(), session, faults=replace(FAULTS, keep=True), settings=settings)


def killed_client(storage: Any, platform: Threads, draw: random.Random) -> RunResult:
    """The client and, as they are on its machine, all functions end after a step; another client goes on."""
    last = draw.randrange(1, EPOCHS * SAMPLES // 8)

    def die(progress: Progress) -> None:
        if progress.step == last:
            platform.stop_all()
            raise KeyboardInterrupt

    try:
        return train(storage, platform, draw, on_progress=die)
    except KeyboardInterrupt:
        again = threads(storage, Fault.NONE, draw)
        try:
            return resume(storage, again, before=platform)
        finally:
            again.stop_all()


def left_alone(storage: Any, platform: Threads, draw: random.Random) -> RunResult:
    """The client leaves once the functions are started; another one collects when none of them runs any more."""
    launch_detached(prepared(storage, platform, RunSettings(name=RUN)))
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s and any(
        platform.status(function.handle).state is State.RUNNING for function in list_functions(storage, Keys(RUN))
    ):
        time.sleep(0.05)
    return resume(storage, platform, before=platform)


def threads(storage: Any, fault: Fault, draw: random.Random) -> Threads:
    """A platform on which `fault` befalls one or two of the first functions."""
    workers = STAGES * REPLICAS
    victims = draw.sample(range(workers), draw.choice((1, 2)))

    def fate_of(number: int) -> Fate:
        moment = draw.randrange(1, REQUESTS)
        if number not in victims:
            return Fate()
        match fault:
            case Fault.KILL | Fault.ORPHAN:
                return Fate(dies_at=moment)
            case Fault.SLEEP:
                return Fate(sleeps_at=moment, sleeps_s=draw.uniform(1.0, 3.0))
            case Fault.FULL:
                return Fate(full_from=moment)
            case _:
                return Fate()

    chosen = frozenset(victims)
    return Threads(
        load_spec("local"),
        storage,
        fate_of=fate_of,
        lost=chosen if fault is Fault.LOST else frozenset(),
        doubled=chosen if fault is Fault.TWICE else frozenset(),
        clock_of=lambda number: _clock(draw.uniform(-300, 300) if fault is Fault.SKEW else 0.0),
    )


def _clock(offset_s: float) -> Callable[[], float]:
    return lambda: time.time() + offset_s


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write every ending as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, expected = run(0, Fault.NONE, None)
    assert expected is not None, "the undisturbed run fails"
    faults, endings = [fault for fault in Fault if fault is not Fault.NONE], []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        endings.append(run(seed, faults[seed % len(faults)], expected)[0])
        if endings[-1].outcome != "same bits":
            print(f"seed {seed}, {endings[-1].fault.value}: {endings[-1].error or endings[-1].outcome}", flush=True)
    show(endings)
    if options.output:
        rows = [{**{k: getattr(e, k) for k in Ending.__slots__}, "fault": e.fault.value} for e in endings]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any(not good(ending) for ending in endings):
        raise SystemExit("a run hung, ended with other bits, or left something behind")


def good(ending: Ending) -> bool:
    """Whether a run ended as it may: in time, with the same bits or an error that says why, and nothing left."""
    ended = ending.outcome != "OTHER BITS" and ending.seconds < DEADLINE_S
    return ended and not ending.left_objects and not ending.left_functions


def show(endings: list[Ending]) -> None:
    outcomes = sorted({ending.outcome for ending in endings}, key=lambda name: (name != "same bits", name))
    print(f"{'fault':34} {'runs':>5} {'restarts':>9} {'longest s':>10}  " + "  ".join(outcomes))
    for fault in Fault:
        some = [ending for ending in endings if ending.fault is fault]
        if some:
            counts = Counter(ending.outcome for ending in some)
            restarts, longest_s = sum(e.restarts for e in some), max(e.seconds for e in some)
            cells = "  ".join(f"{counts[name]:>{len(name)}}" for name in outcomes)
            print(f"{fault.value:34} {len(some):>5} {restarts:>9} {longest_s:>10.1f}  {cells}")
    left = sum(e.left_objects for e in endings), sum(e.left_functions for e in endings)
    print(f"{len(endings)} runs; left behind: {left[0]} objects, {left[1]} functions")


if __name__ == "__main__":
    main()
