"""Somebody who may write to the storage changes what functions are started with: nothing of theirs is ever run.

Each test first lets a function die, as the attacker may wait for or cause, so that somebody starts it again from what
lies in the storage: a worker that waits for it, a client that watches the run, the watchdog.
"""

import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from funcpipe.client.control.status import RunStatus, status
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Outcome, RunSettings, WatchSpec, WorkerSpec, from_text
from funcpipe.core.backoff import Backoff
from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage, WorkerFailed
from funcpipe.model.split import load_stage
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.documents import encode_document
from funcpipe.runstate.functions import list_detached
from funcpipe.runstate.generations import list_generations
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import KeyFolder, SignedStorage, key_of
from funcpipe.testing.faults import FunctionFaults, FunctionKilled
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.worker.watchdog import watch
from tests.examples import in_long_run
from tests.support import chaos
from tests.support.plans import even_stages
from tests.support.waiting import wait_until

RUN = "run-1"
QUICK = FaultTolerance(heartbeat_s=0.05, lease_s=0.3, checkpoint_steps=2, start_s=1.0, keep=True)
STEADY = dataclasses.replace(QUICK, heartbeat_s=0.2, lease_s=30.0)
"""No worker is missed by the others while a test lasts."""


@functools.cache
def job(stages: int) -> Job:
    """Six steps of `stages` workers."""
    made = chaos.job()
    layers = even_stages([layer.name for layer in made.graph.layers], stages)
    plan = dataclasses.replace(made.plan, replicas=1, stages=layers)
    return dataclasses.replace(made, plan=plan, epochs=2, prices=load_spec("local"))


@pytest.fixture(scope="module", autouse=True)
def traced() -> None:
    """A model cannot be traced while threads draw random numbers in the same process."""
    job(1)
    job(3)


class Planted:
    """Code that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


class Claims:
    """A keyring of somebody who signs what is not theirs with a key of their own."""

    def find(self, keys: Keys) -> RunKey | None:
        return RunKey("0bad" * 16)


def plain(storage: MemoryStorage, key: str, data: bytes) -> None:
    """As everybody wrote before runs had keys: documents have a checksum, code has its hash in the payload."""
    storage.put(key, data)


def with_another_key(storage: MemoryStorage, key: str, data: bytes) -> None:
    SignedStorage(storage, Claims()).put(key, data)


def with_the_old_signature(storage: MemoryStorage, key: str, data: bytes) -> None:
    storage.put(key, data + storage.get(key)[-57:])


WAYS = [plain, with_another_key, with_the_old_signature]


class Attacked(MemoryStorage):
    """A storage in which the function of `victim` dies when it first puts a key with `fatal` in it.

    At that moment somebody changes its payload and its stage's code, so that who starts it again would run `mark`.
    """

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark
        self.fatal: str | None = None
        self.stage = 0
        self.faults = FunctionFaults()
        self.way: Callable[[MemoryStorage, str, bytes], None] = plain

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if self.fatal is not None and self.fatal in key:
            self.fatal = None
            self.attack()
            self.faults.dead.set()
            raise FunctionKilled("the function was killed")
        super().put(key, data, if_absent=if_absent, gate=gate)

    def attack(self) -> None:
        keys, code = generation_in(self), pickle.dumps(Planted(self.mark))
        payload = keys.payload(f"s{self.stage}.r0")
        told = from_text(WorkerSpec, self.get(payload)[: self.get(payload).rindex(b"}") + 1], source=payload)
        other = dataclasses.replace(told, bundle_sha256=hashlib.sha256(code).hexdigest())
        self.way(self, keys.bundle(self.stage), code)
        self.way(self, payload, encode_document(other))


def generation_in(storage: MemoryStorage) -> Keys:
    """The generation of the run, which anybody sees who may list."""
    return list_generations(storage, RUN)[-1]


class Place:
    """An attacked storage, and a platform of which the first function of the attacked stage is the one that dies."""

    def __init__(self, stages: int, mark: Path, faults: FaultTolerance) -> None:
        self.stages = stages
        self.faults = faults
        self.storage = Attacked(mark)
        self.platform = ThreadPlatform(
            load_spec("local"),
            self.storage,
            faults_of=lambda number: self.storage.faults if number == self.storage.stage else FunctionFaults(),
        )

    def prepared(self, settings: RunSettings) -> PreparedRun:
        session = session_on(Site(self.platform, self.storage, "memory://"), reopen=self.platform.open)
        return prepare(job(self.stages), session, faults=self.faults, settings=settings)

    def begin(self, *, stage: int, way: Callable[[MemoryStorage, str, bytes], None]) -> None:
        """Say whom the attack is for."""
        self.storage.stage, self.storage.fatal, self.storage.way = stage, f"checkpoints/s{stage}/00000004", way

    def leave(self) -> None:
        """Start a detached run, and wait until the function has died."""
        launch_detached(self.prepared(RunSettings(name=RUN)))
        wait_until(self.storage.faults.dead.is_set)

    def told(self) -> RunStatus:
        return status(self.storage, RUN, self.platform.open)

    def assert_it_can_be_resumed(self) -> None:
        """With the client's own code, to the bits of an undisturbed run."""
        self.platform.stop_all()
        found = launch(self.prepared(RunSettings(resume=RUN))).state_dict()
        assert not self.storage.mark.exists()
        expected = undisturbed(self.stages)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        assert self.storage.list("") == ()


@functools.cache
def undisturbed(stages: int) -> Mapping[str, torch.Tensor]:
    return launch(Place(stages, Path("/unused"), STEADY).prepared(RunSettings(name=RUN))).state_dict()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    stages, faults = request.param
    made = Place(stages, tmp_path / "was here", faults)
    yield made
    made.platform.stop_all()
    assert not made.storage.mark.exists()


def test_planted_code_is_run_when_it_is_loaded(tmp_path: Path) -> None:
    """Or the other tests would show nothing."""
    with pytest.raises(TypeError):
        load_stage(pickle.dumps(Planted(tmp_path / "was here")), {})
    assert (tmp_path / "was here").exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [(3, QUICK)], indirect=True, ids=["three workers"])
def test_a_worker_starts_none_of_its_peers_with_it(
    place: Place, way: Callable[[MemoryStorage, str, bytes], None]
) -> None:
    place.begin(stage=1, way=way)
    place.leave()
    wait_until(lambda: any(worker.outcome is Outcome.FAILED for worker in place.told().workers))
    errors = [worker.error or "" for worker in place.told().workers]
    assert any(f"{generation_in(place.storage).payload('s1.r0')} is not signed by its run" in error for error in errors)
    place.assert_it_can_be_resumed()


@pytest.mark.parametrize("way", [WAYS[0], *in_long_run(WAYS[1:])])
@pytest.mark.parametrize("place", [(3, STEADY)], indirect=True, ids=["three workers"])
def test_a_client_that_watches_a_run_restarts_no_worker_with_it(
    place: Place, way: Callable[[MemoryStorage, str, bytes], None]
) -> None:
    place.begin(stage=1, way=way)
    place.leave()
    watching = place.prepared(RunSettings(resume=RUN))
    assert watching.running is not None
    with pytest.raises(CorruptMessage, match=r"payloads/s1\.r0 is not signed by its run"):
        launch(watching)
    place.assert_it_can_be_resumed()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [(1, STEADY)], indirect=True, ids=["one worker"])
def test_a_client_that_has_started_a_run_restarts_no_worker_with_it(
    place: Place, way: Callable[[MemoryStorage, str, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the payloads itself, and the code that they name is not there any more."""
    at_once = Backoff(first_s=1.0, most_s=1.0, draw=lambda: 0.0)
    monkeypatch.setattr("funcpipe.platforms.function_group.RESTART_PAUSES", at_once)
    place.begin(stage=0, way=way)
    with pytest.raises(WorkerFailed, match=r"stage/s0\.bundle is not signed by its run"):
        launch(place.prepared(RunSettings(name=RUN)))
    place.assert_it_can_be_resumed()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [(1, STEADY)], indirect=True, ids=["one worker"])
def test_the_watchdog_restarts_no_worker_with_it(
    place: Place, way: Callable[[MemoryStorage, str, bytes], None], caplog: pytest.LogCaptureFixture
) -> None:
    place.begin(stage=0, way=way)
    place.leave()
    keys = generation_in(place.storage)
    watch(
        WatchSpec(storage="memory://", run=RUN, run_key=key_of(KeyFolder(), keys).text),
        place.storage,
        place.platform.open,
    )
    assert f"{keys.payload('s0.r0')} is not signed by its run" in caplog.text
    assert list_detached(place.storage) == (keys.prefix,)
    place.assert_it_can_be_resumed()
