"""One run in which something goes wrong: it must end with the very bits of an undisturbed one, or say why not.

A job of 3 stages x 2 replicas is trained over functions that are threads; the fault's victims and moments are drawn by
seed. For many runs there is `experiments/studies/chaos.py`.
"""

import functools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import OnProgress, Progress, RunResult, ignore_progress
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Plan, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.errors import FuncPipeError
from funcpipe.model.graph import trace
from funcpipe.platforms.base import OpenPlatform, State, Storage
from funcpipe.platforms.catalog import load_spec, open_platform
from funcpipe.platforms.wrappers import Retried
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import STORAGE_FAULTS, ClientKilled, Fault, Outage, damage
from funcpipe.testing.faulty_storage import FaultyStorage
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.recipe import Recipe
from tests.support.faulty_threads import REQUESTS, SHORT_DEADLINE_S, threads
from tests.support.plans import even_stages

STAGES, REPLICAS, SAMPLES, EPOCHS = 3, 2, 24, 3
DEADLINE_S = 60.0
RUN = "chaos"
FAULTS = FaultTolerance(heartbeat_s=0.2, lease_s=1.0, start_s=2.0, checkpoint_steps=2)
OUTAGE_S = 2.0


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
    """The network that is trained, always with the same weights."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    """The samples: vectors of six numbers, and their classes."""
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(6, generator=draw), torch.tensor(i % 4)) for i in range(SAMPLES)]


def job(message_deadline_s: float = DEADLINE_S / 3) -> Job:
    """Train `model()` on `data()` by a plan of STAGES stages x REPLICAS replicas."""
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
        recipe=Recipe(loss=nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.Adam, lr=0.01)),
        dataset=data,
        samples=SAMPLES,
        epochs=EPOCHS,
        seed=0,
        shuffle=True,
        message_deadline_s=message_deadline_s,
        prices=load_spec("local"),
    )


def run(
    seed: int, fault: Fault, expected: Mapping[str, Tensor] | None, objects: Storage | None = None
) -> tuple[Ending, Mapping[str, Tensor] | None]:
    """Train under `fault`: how that ended, and the tensors of the trained state, None after an error.

    `expected` holds the tensors of an undisturbed run; None while there is none. `objects` is an empty storage.
    """
    draw, began_s = random.Random(seed), time.monotonic()
    objects = MemoryStorage() if objects is None else objects
    storage = _disturbed(objects, fault, seed)
    platform = threads(storage, fault, draw, workers=STAGES * REPLICAS)
    error, restarts, tensors = "", 0, None
    try:
        ways: dict[Fault, Callable[..., RunResult]] = defaultdict(lambda: _train)
        ways |= {Fault.CLIENT: _client_killed, Fault.ORPHAN: _client_gone, Fault.CLIENTS: _two_clients}
        ways |= {Fault.HANDING: _handing_over, Fault.ZOMBIE: _impatient}
        ways |= {Fault.DAMAGED: functools.partial(_client_killed, then=functools.partial(damage, objects, RUN))}
        result = ways[fault](Retried(storage), platform, draw)
        tensors, restarts = result.state_dict(), result.bill.functions - STAGES * REPLICAS
    except FuncPipeError as caught:
        error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    finally:
        platform.stop_all()
    same = tensors is not None and (expected is None or _equal(tensors, expected))
    outcome = "same bits" if same else ("OTHER BITS" if tensors is not None else error.partition(":")[0])
    if error:
        objects.delete_many(objects.list(f"{RUN}/"))  # what `funcpipe run clean` does once the functions have ended
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


def _disturbed(objects: Storage, fault: Fault, seed: int) -> Storage:
    """`objects` as all functions and clients find them under `fault`."""
    storage = objects
    if fault in STORAGE_FAULTS:
        storage = FaultyStorage(storage, STORAGE_FAULTS[fault], seed=seed)
    if fault in (Fault.OUTAGE, Fault.MIXED):
        begins = random.Random(seed).randrange(50, STAGES * REPLICAS * REQUESTS // 4)
        storage = Outage(storage, begins=begins, seconds=OUTAGE_S)
    return storage


def _train(
    storage: Any,
    platform: ThreadPlatform,
    draw: random.Random,
    *,
    on_progress: OnProgress = ignore_progress,
    made: Job | None = None,
) -> RunResult:
    return launch(_prepared(storage, platform, RunSettings(name=RUN), made=made), on_progress)


def _impatient(storage: Any, platform: ThreadPlatform, draw: random.Random) -> RunResult:
    """Messages are waited for no longer than functions sleep."""
    return launch(_prepared(storage, platform, RunSettings(name=RUN), deadline_s=SHORT_DEADLINE_S))


def _handing_over(storage: Any, platform: ThreadPlatform, draw: random.Random) -> RunResult:
    """Functions live only for some steps."""
    short = replace(FAULTS, lifetime_s=1.0, cold_start_s=0.05)
    return launch(_prepared(storage, platform, RunSettings(name=RUN), faults=short))


def _two_clients(storage: Any, platform: ThreadPlatform, draw: random.Random) -> RunResult:
    """Another client starts a run of the same name meanwhile; whichever is refused, the other's result counts."""
    results: list[RunResult] = []
    errors: list[FuncPipeError] = []

    def train(after_s: float, made: Job) -> None:
        time.sleep(after_s)
        try:
            results.append(_train(storage, platform, draw, made=made))
        except FuncPipeError as error:
            errors.append(error)

    delays_s = (0.0, draw.uniform(0.0, 0.5))
    jobs = [job() for _ in delays_s]  # made before, as weights are drawn and models traced with state of the process
    clients = [threading.Thread(target=train, args=pair) for pair in zip(delays_s, jobs, strict=True)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if not results:
        raise errors[0]
    return results[0]


def _resume(storage: Any, platform: ThreadPlatform, *, before: ThreadPlatform) -> RunResult:
    """Go on with the run, whose functions ran on `before`."""
    return launch(_prepared(storage, platform, RunSettings(resume=RUN), reopen=before.open))


def _prepared(
    storage: Any,
    platform: ThreadPlatform,
    settings: RunSettings,
    *,
    faults: FaultTolerance = FAULTS,
    deadline_s: float = DEADLINE_S / 3,
    reopen: OpenPlatform = open_platform,
    made: Job | None = None,
) -> PreparedRun:
    session = session_on(Site(platform, storage, "memory://here"), reopen=reopen)
    return prepare(made or job(deadline_s), session, faults=replace(faults, keep=True), settings=settings)


def _client_killed(
    storage: Any,
    platform: ThreadPlatform,
    draw: random.Random,
    *,
    then: Callable[[random.Random], None] = lambda draw: None,
) -> RunResult:
    """The client and, as they are on its machine, all functions end after a step; another client resumes it `then`."""
    last = draw.randrange(1, EPOCHS * SAMPLES // 8)

    def die(progress: Progress) -> None:
        if progress.step == last:
            platform.stop_all()
            raise ClientKilled

    try:
        return _train(storage, platform, draw, on_progress=die)
    except ClientKilled:
        then(draw)
        again = threads(storage, Fault.NONE, draw, workers=STAGES * REPLICAS)
        try:
            return _resume(storage, again, before=platform)
        finally:
            again.stop_all()


def _client_gone(storage: Any, platform: ThreadPlatform, draw: random.Random) -> RunResult:
    """The client leaves once the functions are started; another one collects when none of them runs any more."""
    launch_detached(_prepared(storage, platform, RunSettings(name=RUN)))
    own = signed(storage)
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s and any(
        platform.status(function.handle).state is State.RUNNING
        for function in list_functions(own, Keys.of(newest_record(own, RUN)))
    ):
        time.sleep(0.05)
    return _resume(storage, platform, before=platform)


def _equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def good(ending: Ending, within_s: float = DEADLINE_S) -> bool:
    """Whether a run ended as it may: in time, with the same bits or an error that says why, and nothing left."""
    ended = ending.outcome != "OTHER BITS" and ending.seconds < within_s
    return ended and not ending.left_objects and not ending.left_functions
