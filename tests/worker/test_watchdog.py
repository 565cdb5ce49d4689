"""Detached runs outlive the deaths of workers that nobody waits for, and of all; on functions that are threads."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import stop
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Outcome, RunSettings, WatchSpec
from funcpipe.platforms.base import OPEN, Gate, State, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.cloud import KeyWrap
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import list_detached, list_functions, mark_detached
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import FunctionFaults, FunctionKilled
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.worker.watchdog import Clocks, watch
from tests.recording import Recording
from tests.run_documents import BEAT
from tests.support import chaos
from tests.support.plans import even_stages
from tests.support.waiting import wait_until

RUN = "run-1"
FAULTS = FaultTolerance(heartbeat_s=0.05, lease_s=0.3, checkpoint_steps=2, start_s=1.0, keep=True)
WATCH = WatchSpec(storage="memory://", platform=ThreadPlatform.url)
WRONG = Clocks(now=lambda: 0.0)
"""By the watchdog's clock no heartbeat is as old as it should be, so that it looks at each worker again."""


@functools.cache
def job(stages: int) -> Job:
    """Nine steps of `stages` workers."""
    made = chaos.job()
    layers = even_stages([layer.name for layer in made.graph.layers], stages)
    plan = dataclasses.replace(made.plan, replicas=1, stages=layers)
    return dataclasses.replace(made, plan=plan, prices=load_spec("local"))


@pytest.fixture(scope="module", autouse=True)
def traced() -> None:
    """A model cannot be traced while threads draw random numbers in the same process."""
    job(1)
    job(3)


class Deadly(MemoryStorage):
    """A storage in which functions die when one of them first puts a key with `fatal` in it."""

    fatal: str | None = None
    victims: tuple[FunctionFaults, ...] = ()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if self.fatal is not None and self.fatal in key:
            self.fatal = None
            for victim in self.victims:
                victim.dead.set()
            raise FunctionKilled("the function was killed")
        super().put(key, data, if_absent=if_absent, gate=gate)


class Wrapping:
    """Keys of runs are wrapped on their way to the watchdog, as in a cloud."""

    secret = "of this deployment"

    def wrap_key(self, run_key: str) -> str:
        return KeyWrap(self.secret).wrap(run_key)

    def unwrap_key(self, wrapped: str) -> str:
        return KeyWrap(self.secret).unwrap(wrapped)


class Threads(Wrapping, ThreadPlatform):
    """Functions that are threads, on a platform that wraps keys."""


class Place:
    """A storage, and a platform whose first functions can be killed."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.storage = Deadly()
        self.faults = tuple(FunctionFaults() for _ in range(stages))
        self.platform = Threads(
            load_spec("local"),
            self.storage,
            faults_of=lambda number: self.faults[number] if number < stages else FunctionFaults(),
        )

    def prepared(self, settings: RunSettings) -> PreparedRun:
        session = session_on(Site(self.platform, self.storage, "memory://"), reopen=self.platform.open)
        return prepare(job(self.stages), session, faults=FAULTS, settings=settings)

    def start(self, *, fatal: str | None, victims: tuple[int, ...] = ()) -> None:
        """Start a detached run, and wait until the `victims` among its functions have died at the put of `fatal`."""
        self.storage.fatal, self.storage.victims = fatal, tuple(self.faults[victim] for victim in victims)
        launch_detached(self.prepared(RunSettings(name=RUN)))
        wait_until(lambda: all(self.status(f"s{victim}.r0") is State.FAILED for victim in victims))

    def status(self, worker: str, attempt: int = 0) -> State:
        found = [f for f in list_functions(signed(self.storage), keys_in(self.storage), worker) if f.attempt == attempt]
        return self.platform.status(found[0].handle).state

    def watch(self, spec: WatchSpec = WATCH) -> None:
        watch(spec, self.storage, self.platform.open, clocks=WRONG)

    def attempts(self) -> dict[str, int]:
        """How many functions each worker has been."""
        return Counter(found.worker for found in list_functions(signed(self.storage), keys_in(self.storage)))

    def outcomes(self) -> set[Outcome | None]:
        return {worker.outcome for worker in status(self.storage, RUN).workers}

    def collect(self) -> RunResult:
        wait_until(lambda: self.outcomes() == {Outcome.FINISHED})
        return launch(self.prepared(RunSettings(resume=RUN)))


def keys_in(storage: Storage) -> Keys:
    return Keys.of(newest_record(signed(storage), RUN))


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(request.param)
    yield made
    made.platform.stop_all()


@functools.cache
def undisturbed(stages: int) -> RunResult:
    return launch(Place(stages).prepared(RunSettings(name=RUN)))


def assert_collected(place: Place) -> None:
    """The run has ended with the bits of an undisturbed one, and leaves nothing."""
    expected = undisturbed(place.stages)
    found = place.collect()
    assert found.losses == expected.losses
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())
    assert place.storage.list("") == ()


CASES = [
    pytest.param(1, "checkpoints/s0/00000004", (0,), id="the only worker"),
    pytest.param(3, "checkpoints/s2/00000009", (2,), id="the last stage, when nobody waits for it any more"),
    pytest.param(3, "checkpoints/s1/00000004", (0, 1, 2), id="all at once"),
]


@pytest.mark.parametrize(("place", "fatal", "victims"), CASES, indirect=["place"])
def test_a_detached_run_outlives_deaths_that_no_worker_notices(
    place: Place, fatal: str, victims: tuple[int, ...]
) -> None:
    place.start(fatal=fatal, victims=victims)
    place.watch()
    attempts = place.attempts()
    assert {f"s{victim}.r0" for victim in victims} <= {worker for worker, count in attempts.items() if count > 1}
    assert_collected(place)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_of_watchdogs_that_overlap_one_restarts_a_worker(place: Place) -> None:
    place.start(fatal="checkpoints/s0/00000004", victims=(0,))
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(place.watch) for _ in range(4)]:
            done.result()
    assert place.attempts() == {"s0.r0": 2}
    assert_collected(place)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_a_run_that_was_stopped_is_left_alone(place: Place) -> None:
    place.start(fatal="checkpoints/s0/00000004", victims=(0,))
    stop(place.storage, RUN, place.platform.open, wait_s=0.1)
    place.watch()
    assert place.attempts() == {"s0.r0": 1}
    assert list_detached(place.storage) == ()


@pytest.mark.parametrize("place", [1], indirect=True)
def test_a_run_that_has_finished_is_watched_no_more_and_can_be_collected(place: Place) -> None:
    place.start(fatal=None)
    wait_until(lambda: place.outcomes() == {Outcome.FINISHED})
    assert list_detached(place.storage) == (keys_in(place.storage).prefix,)
    place.watch()
    assert list_detached(place.storage) == ()
    assert place.attempts() == {"s0.r0": 1}
    assert_collected(place)


@pytest.mark.parametrize("place", [1], indirect=True)
def test_a_run_that_is_resumed_or_deleted_is_watched_no_more(place: Place) -> None:
    place.start(fatal="checkpoints/s0/00000004", victims=(0,))
    launch(place.prepared(RunSettings(resume=RUN)))
    assert place.storage.list("") == ()
    mark_detached(place.storage, Keys(RUN, 0, "1a2b3c4d"), "")
    place.watch()
    assert place.storage.list("") == ()


class Counting(MemoryStorage):
    """A storage that counts requests by what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = Counter[str]()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self.requests["put"] += 1
        super().put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        self.requests["get"] += 1
        return super().get(key, start=start, stop=stop, gate=gate)

    def list(self, prefix: str) -> tuple[str, ...]:
        self.requests["list"] += 1
        return super().list(prefix)


class Idle(Wrapping, Recording):
    """A platform that starts nothing."""

    def detach(self) -> None:
        """Nothing."""


def test_a_look_is_one_request_and_some_more_for_a_run_at_work() -> None:
    storage, platform = Counting(), Idle()
    spec = dataclasses.replace(WATCH, platform=platform.url)
    watch(spec, storage, platform.open)
    assert storage.requests == {"list": 1}
    session = session_on(Site(platform, storage, "memory://"), reopen=platform.open)
    launch_detached(prepare(job(3), session, faults=FAULTS, settings=RunSettings(name=RUN)))
    keys = keys_in(storage)
    for stage in range(3):
        beat = dataclasses.replace(BEAT, worker=f"s{stage}.r0", sent_at_s=100.0)
        put_document(signed(storage), keys.heartbeat(beat.worker, beat.attempt), beat)
    storage.requests.clear()
    watch(spec, storage, platform.open, clocks=Clocks(now=lambda: 100.0 + FAULTS.heartbeat_s / 2))
    assert storage.requests["list"] == 3  # marks, generations, heartbeats
    assert storage.requests["get"] == 4 + 3  # the key in the mark, record, order, payload; heartbeats
    assert len(platform.invoked) == 3
