"""Runs in a storage that deletes objects by their age, and that last longer than that; a step takes a day here."""

import contextlib
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import RunSettings
from funcpipe.core.settings import NO_LIMITS, WHY_GONE
from funcpipe.errors import RunHalted, RunUnknown, WorkerFailed
from funcpipe.neighbours.parameter_server import on_functions as server_functions
from funcpipe.neighbours.parameter_server import training as server_run
from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions, train_on_functions
from funcpipe.neighbours.parameter_server.training import ServerRun
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_market, load_spec
from funcpipe.runstate.renewal import DAY_S, Renewal
from funcpipe.testing.faults import ClientKilled, FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.worker import checkpoint_manager
from funcpipe.worker.progress import WorkerProgress
from tests.client.threads import RUN, STEADY, smaller_job
from tests.examples import in_long_run
from tests.support.ageing_storage import AgeingStorage

pytestmark = pytest.mark.usefixtures("traced")

KEEP_DAYS, EPOCHS = 4, 4
STEPS = 12
"""Days that the run takes."""

_STEP_OF_MESSAGE = re.compile(r"/messages/[^/]+/(\d{8})/")
TIMEOUT_S = 60.0


class Daily(AgeingStorage):
    """A storage in which each step takes a day: nobody puts a message of the next one before objects are renewed."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage(), keep_days=KEEP_DAYS)
        self.renews = self.goes_on = True
        self._renewed = threading.Condition()
        self.renewed_on: set[int] = {0}

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        found = _STEP_OF_MESSAGE.search(key)
        if found:
            self._begin(int(found[1]))
        super().put(key, data, if_absent=if_absent, gate=gate)
        if "/renewals/" in key:
            with self._renewed:
                self.renewed_on.add(int(key[-8:]))
                self._renewed.notify_all()

    def stand_still(self) -> None:
        """Let no day pass from now on, and nobody wait."""
        with self._renewed:
            self.goes_on = False
            self._renewed.notify_all()

    def _begin(self, step: int) -> None:
        with self._renewed:
            due = self._renewed.wait_for(lambda: not self.goes_on or step <= self.day or self._is_renewed, TIMEOUT_S)
            if not due:
                raise AssertionError(f"nobody has renewed what lies there on day {self.day}")
            if self.goes_on and step > self.day:
                self.pass_to(step)

    @property
    def _is_renewed(self) -> bool:
        return not self.renews or self.day in self.renewed_on


@pytest.fixture
def daily(monkeypatch: pytest.MonkeyPatch) -> Daily:
    """Functions know the time of the run by this storage's clock."""
    storage = Daily()
    monkeypatch.setattr(WorkerProgress, "run_s", property(lambda self: storage.day * DAY_S))
    return storage


def killed_on(day: int, worker: str, number: int) -> Callable[[int], FunctionFaults]:
    """The function of the nth invocation, which is `worker`, dies when it sends its first message of the day."""
    written = (f"/messages/{worker}/{day:08d}/", 1)
    return lambda invocation: FunctionFaults(killed_writing=written if invocation == number else None)


def prepared(storage: Daily | MemoryStorage, functions: ThreadPlatform, **settings: object) -> PreparedRun:
    job = replace(smaller_job(stages=2, replicas=2), epochs=EPOCHS, prices=functions.spec)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    own = RunSettings(**(settings or {"name": RUN}))  # type: ignore[arg-type]
    faults = replace(STEADY, heartbeat_s=0.05, keep=True)
    return prepare(job, replace(session, lasts=True), faults=faults, settings=own)


@pytest.fixture(scope="module")
def undisturbed(traced: None) -> RunResult:
    storage = MemoryStorage()
    return launch(prepared(storage, ThreadPlatform(load_spec("local"), storage)))


def assert_same(found: RunResult, expected: RunResult) -> None:
    assert found.losses == expected.losses
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize(("worker", "number"), [("s0.r1", 1), *in_long_run([("s0.r0", 0), ("s1.r0", 2)])])
def test_a_run_outlives_the_age_at_which_its_storage_deletes_objects(
    worker: str, number: int, daily: Daily, undisturbed: RunResult, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="funcpipe")
    functions = ThreadPlatform(load_spec("local"), daily, faults_of=killed_on(8, worker, number))
    result = launch(prepared(daily, functions))
    assert_same(result, undisturbed)
    assert f"restarts worker {worker} as attempt 1" in caplog.text
    assert daily.renewed_on >= set(range(STEPS - 1))  # the run may end before the last day is over
    assert not [key for key in daily.expired if not re.search(r"/(messages|traces|leases|heartbeats)/", key)]
    assert (len(result.workers), len(result.losses)) == (4, STEPS)
    again = prepared(daily, functions, resume=RUN)
    assert_same(launch(again), undisturbed)  # what is kept of it is read


def test_what_nobody_renews_is_lost_truthfully_and_the_run_resumed_from_its_checkpoints(
    daily: Daily, undisturbed: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a bucket whose objects live for less than a day."""
    daily.renews = False
    monkeypatch.setattr(Renewal, "renew_due", lambda self, run_s: None)
    monkeypatch.setattr(checkpoint_manager, "_RECORD_S", 0.0)  # an hour, of which a day has more
    functions = ThreadPlatform(load_spec("local"), daily)
    with pytest.raises((RunHalted, WorkerFailed), match=re.escape(WHY_GONE)):
        launch(prepared(daily, functions))
    functions.stop_all()
    daily.keep_days = 100
    again = ThreadPlatform(load_spec("local"), daily)
    resumed = prepared(daily, again, resume=RUN)
    assert resumed.first_step >= KEEP_DAYS - 2
    result = launch(resumed)
    assert len(result.losses) == STEPS
    assert result.losses[resumed.first_step :] == undisturbed.losses[resumed.first_step :]
    expected = undisturbed.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in result.state_dict().items())


def test_a_run_that_pauses_is_kept_for_as_long_as_its_storage_keeps_objects(
    daily: Daily, undisturbed: RunResult
) -> None:
    def pause(progress: Progress) -> None:
        if progress.step == 6:
            daily.stand_still()
            raise ClientKilled

    functions = ThreadPlatform(load_spec("local"), daily)
    with pytest.raises(ClientKilled):
        launch(prepared(daily, functions), pause)
    paused_on = daily.day
    daily.pass_to(paused_on + KEEP_DAYS - 2)
    daily.goes_on = True
    assert_same(launch(prepared(daily, functions, resume=RUN)), undisturbed)
    daily.pass_to(daily.day + KEEP_DAYS)
    assert daily.list("") == ()
    with pytest.raises(RunUnknown, match=f"there is no run '{RUN}' in this storage; .* platform.keep-days of deploy"):
        prepared(daily, functions, resume=RUN)


def test_the_client_of_a_parameter_server_renews_what_it_and_its_functions_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock of the client, on which a day passes with each look."""

    class Clock:
        days = itertools.count()

        def monotonic(self) -> float:
            return next(self.days) * DAY_S

    class Touched(MemoryStorage):
        def touch(self, key: str) -> None:
            super().touch(key)
            touched.add(key)

    storage, touched = Touched(), set[str]()
    functions = ThreadPlatform(load_spec("local"), storage)

    @contextlib.contextmanager
    def opened(*_: object, **__: object) -> Iterator[Session]:
        yield replace(session_on(Site(functions, storage, "memory://"), reopen=functions.open), lasts=True)

    renew_due = Renewal.renew_due

    def renew_and_wait(self: Renewal, run_s: float) -> None:
        renew_due(self, run_s)
        if self._round is not None:
            self._round.result()

    monkeypatch.setattr(Renewal, "renew_due", renew_and_wait)
    monkeypatch.setattr(server_functions, "open_session", opened)
    monkeypatch.setattr(server_run, "time", Clock())
    job = smaller_job(stages=1, replicas=1)
    run = ServerRun(global_batch=job.plan.global_batch, micro_batch=job.plan.micro_batch, save_every=1)
    one = ServerFunctions(workers=1, memory_mb=512)
    train_on_functions(job, one, run, RunSettings(name=RUN), load_market("aws"), limits=NO_LIMITS)
    kinds = {re.sub(r"g0000-[0-9a-f]+", "g", key).removeprefix(f"{RUN}/") for key in touched}
    assert kinds >= {"g/stage/s0.bundle", "g/stage/s0.tensors", "g/server/data/dataset.bundle"}
    assert any(key.startswith("owner/leases/") for key in kinds)
    assert any(key.startswith("generations/0000-") for key in kinds)
    assert not [key for key in storage.list("") if "/server/checkpoints/" not in key]  # which are kept
