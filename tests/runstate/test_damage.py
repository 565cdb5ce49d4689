"""Any one object of a stopped run is damaged or lost: the run goes on, after the same or an earlier checkpoint."""

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from funcpipe.client.control.status import status
from funcpipe.client.control.verdict import Verdict
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import FaultTolerance, Halt, RunSettings
from funcpipe.errors import CorruptMessage, PlatformError, RunHalted, RunUnknown
from funcpipe.platforms.base import OPEN, Gate, Platform
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import list_generations, newest_record
from funcpipe.runstate.halt import halt_run
from funcpipe.runstate.keys import Keys, is_message
from funcpipe.runstate.reader import spent_so_far
from funcpipe.runstate.resume import load_first_tensors, load_resume_point
from funcpipe.runstate.signing import RUN_KEY, KeyFolder, key_of, signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import capture_state
from tests.examples import in_long_run
from tests.support import chaos
from tests.support.census import below_generation
from tests.support.waiting import LONG_S

RUN = "run-1"
FAULTS = FaultTolerance(heartbeat_s=0.05, lease_s=30.0, checkpoint_steps=2, retained_objects=4, keep=True)


def flipped(data: bytes) -> bytes:
    """With one wrong bit in the middle."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a flipped bit": lambda data: flipped(data) if data else data,
    "cut off": lambda data: data[: len(data) // 2],
    "gone": lambda data: None,
}


class Patient(MemoryStorage):
    """A storage that takes no message of the sixth step before each worker has read an order to end the run.

    So the order comes in time, however slow the client is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._readers: set[int] = set()
        self._knowing: set[int] = set()
        self._all_know = threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if is_message(key) and "/00000005/" in key:
            assert self._all_know.wait(LONG_S), "the order was not read"
        super().put(key, data, if_absent=if_absent, gate=gate)
        if threading.get_ident() in self._readers:  # a heartbeat, which follows what it has read
            self._knowing.add(threading.get_ident())
            if len(self._knowing) == chaos.STAGES * chaos.REPLICAS:
                self._all_know.set()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        found = super().get(key, start=start, stop=stop, gate=gate)
        if "/halts/" in key and threading.current_thread().name == "funcpipe-heartbeat":
            self._readers.add(threading.get_ident())
        return found


@pytest.fixture(scope="module")
def job() -> Job:
    return chaos.job(message_deadline_s=120.0)


@pytest.fixture(scope="module")
def stopped(job: Job) -> Iterator[dict[str, bytes]]:
    """All objects of a run that was ordered to end after six of nine steps.

    Its key is told in the environment: those who resume the run to its end delete what is kept of it.
    """
    storage = Patient()
    platform = ThreadPlatform(load_spec("local"), storage)
    given = threading.Event()

    def order(progress: Progress) -> None:
        if progress.step and not given.is_set():
            given.set()
            halt_run(signed(storage), Keys.of(newest_record(signed(storage), RUN)), Halt(reason="enough", step=6))

    with pytest.raises(RunHalted):
        launch(prepare(job, on(storage, platform), faults=FAULTS, settings=RunSettings(name=RUN)), order)
    platform.stop_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_KEY, key_of(KeyFolder(), list_generations(storage, RUN)[0]).text)
        yield {key: storage.get(key) for key in storage.list("")}


def gone(url: str) -> Platform:
    raise PlatformError(f"there is no platform {url}")


def on(storage: MemoryStorage, platform: ThreadPlatform) -> Session:
    return session_on(Site(platform, storage, "memory://"), reopen=platform.open)


def filled(objects: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    for key, data in objects.items():
        storage.put(key, data)
    return storage


def damaged(objects: dict[str, bytes], key: str, damage: str) -> MemoryStorage:
    storage, data = filled(objects), DAMAGES[damage](objects[key])
    if data is None:
        storage.delete(key)
    else:
        storage.put(key, data)
    return storage


def states(objects: dict[str, bytes]) -> dict[int, dict[str, Tensor]]:
    """What the whole model had learned after each saved step."""
    storage, found = signed(filled(objects)), dict[int, dict[str, Tensor]]()
    record = newest_record(storage, RUN)
    while (point := load_resume_point(storage, record)).state is not None:
        found[point.step] = dict(point.state.tensors)
        names = Checkpoints(storage, point.keys).index().saved[0]
        storage.delete(point.keys.checkpoint(0, next(name for step, name in names if step == point.step)))
    return found


@pytest.mark.parametrize("damage", ["a flipped bit", *in_long_run(["cut off", "gone"])])
def test_whatever_is_damaged_costs_one_checkpoint_at_most(stopped: dict[str, bytes], damage: str) -> None:
    assert sum("/losses/" in key for key in stopped) == 4  # two summaries of each replica
    expected = states(stopped)
    assert sorted(expected)[-2:] == [4, 6]
    earlier = set()
    for key in stopped:
        storage = signed(damaged(stopped, key, damage))
        record = newest_record(storage, RUN)
        point = load_resume_point(storage, record)
        assert point.state is not None, key
        assert point.step == 6 or ("/checkpoints/" in key and point.step == 4), key
        earlier |= {key} if point.step == 4 else set()
        assert point.state.tensors.keys() == expected[point.step].keys()
        assert all(torch.equal(tensor, expected[point.step][name]) for name, tensor in point.state.tensors.items())
        assert len(point.losses) == point.step, key
        assert not any(math.isnan(loss) for loss in point.losses), key
        assert spent_so_far(storage, record).spent_usd > 0, key
        assert len(list_functions(storage, point.keys)) >= 5, key
    assert len(earlier) >= 6  # the files and the manifest of each stage


@pytest.mark.parametrize("damage", ["cut off", *in_long_run(["a flipped bit", "gone"])])
def test_whatever_is_damaged_the_state_of_the_run_can_be_told(stopped: dict[str, bytes], damage: str) -> None:
    for key in stopped:
        storage = damaged(stopped, key, damage)
        told = status(storage, RUN, gone, pause=lambda s: None)
        ends_a_worker = "/leases/s" in key and key.endswith("1")  # who has ended with that entry counts as lost
        assert told.verdict is (Verdict.DEAD if ends_a_worker else Verdict.STOPPED), key
        assert told.saved_step in (4, 6), key


def one_of_each_kind(objects: dict[str, bytes]) -> list[str]:
    """A key of each folder of the run."""
    return sorted({below_generation(key)[0]: key for key in objects}.values())


def test_a_run_of_which_something_is_damaged_ends_with_the_same_bits(job: Job, stopped: dict[str, bytes]) -> None:
    plain = MemoryStorage()
    session = on(plain, ThreadPlatform(load_spec("local"), plain))
    expected = launch(prepare(job, session, faults=FAULTS, settings=RunSettings(name=RUN))).state_dict()
    for key in one_of_each_kind(stopped):
        storage = damaged(stopped, key, "a flipped bit" if stopped[key] else "gone")
        again = ThreadPlatform(load_spec("local"), storage)
        session = session_on(Site(again, storage, "memory://"), reopen=gone)
        result = launch(prepare(job, session, faults=FAULTS, settings=RunSettings(resume=RUN)))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in result.state_dict().items()), key
        assert len(result.losses) == 9
        assert storage.list("") == (), key


def test_a_run_whose_checkpoints_are_all_damaged_begins_again_only_if_that_is_wanted(stopped: dict[str, bytes]) -> None:
    objects = {key: flipped(data) if "/checkpoints/s1/" in key else data for key, data in stopped.items()}
    storage = filled(objects)
    with pytest.raises(RunUnknown, match=r"no checkpoint can be read: .*checkpoints/s1.*--from-start"):
        load_resume_point(signed(storage), newest_record(signed(storage), RUN))
    session = session_on(Site(ThreadPlatform(load_spec("local"), storage), storage, "memory://"), reopen=gone)
    job = chaos.job()
    for parameter in job.graph.module.parameters():
        parameter.data.zero_()  # the run has begun with others
    prepared = prepare(job, session, settings=RunSettings(resume=RUN, from_start=True))
    assert prepared.resumed is not None
    assert (prepared.resumed.step, prepared.resumed.losses) == (0, ())
    assert prepared.account.spent_usd > 0
    uploaded = load_first_tensors(signed(storage), newest_record(signed(storage), RUN))
    for stage in prepared.stages:
        assert all(torch.equal(tensor, uploaded[name]) for name, tensor in stage.tensors.items())
        assert any(tensor.any() for tensor in stage.tensors.values())


def test_a_record_of_which_no_copy_can_be_read_is_told(stopped: dict[str, bytes]) -> None:
    storage = filled(stopped)
    keys = Keys.of(newest_record(signed(storage), RUN))
    for key in keys.records:
        storage.put(key, flipped(stopped[key]))
    with pytest.raises(CorruptMessage, match=keys.saved_record):
        newest_record(signed(storage), RUN)


def test_a_worker_whose_checkpoint_is_damaged_says_that_the_run_can_be_resumed(stopped: dict[str, bytes]) -> None:
    key = max(key for key in stopped if "/checkpoints/s0/" in key and key.endswith(".safetensors"))
    for damage in DAMAGES:
        storage = signed(damaged(stopped, key, damage))
        checkpoints = Checkpoints(storage, Keys.of(newest_record(storage, RUN)))
        with pytest.raises(RunUnknown, match=rf"worker s0\.r1 cannot restart.*{key}.*--resume {RUN}"):
            checkpoints.load_latest((0, 1))


class Damaging(MemoryStorage):
    """A storage that flips a bit of every file of a checkpoint that it is given."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        body = flipped(bytes(data)) if key.endswith(".safetensors") else data
        super().put(key, body, if_absent=if_absent, gate=gate)


class Counting(MemoryStorage):
    """A storage that counts reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gets = 0

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        self.gets += 1
        return super().get(key, start=start, stop=stop, gate=gate)


def test_a_checkpoint_that_reads_back_otherwise_does_not_exist() -> None:
    state, storage, keys = capture_state(nn.Linear(3, 2), None, GradientNorm()), Damaging(), Keys(RUN)
    with pytest.raises(CorruptMessage, match="reads back otherwise than it was written"):
        Checkpoints(storage, keys).save(0, 1, state, writer="w")
    assert Checkpoints(storage, keys).index().saved == {}


def test_reading_back_a_small_checkpoint_takes_two_requests() -> None:
    storage = Counting()
    Checkpoints(storage, Keys(RUN)).save(0, 1, capture_state(nn.Linear(3, 2), None, GradientNorm()), writer="w")
    assert storage.gets == 2  # its file, and its manifest
