"""A limit of the run that is reached at any moment: all workers have saved the last step that all of them did.

Functions are threads, and the limit is reached when a test says so: whatever the load, no time is compared with it.
"""

import functools
import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, RunLimits, RunSettings
from funcpipe.core.settings import NO_LIMITS
from funcpipe.errors import RunHalted
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.checkpoint_index import read_index
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.halt import BudgetGuard
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.worker import hand_over
from tests.e2e import small
from tests.e2e.plans import even_plan
from tests.examples import in_long_run
from tests.in_process import make_job

RUN = "run-1"
NAMED = RunSettings(name=RUN)
FAULTS = FaultTolerance(heartbeat_s=0.3, lease_s=60.0, start_s=60.0, keep=True)


def model() -> nn.Module:
    """A network whose forwards change buffers, which a step that is cut short must not have changed."""
    torch.manual_seed(3)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return nn.Sequential(*layers)


@functools.cache
def job(replicas: int = 1, epochs: int = 8) -> Job:
    plan = even_plan(model(), (torch.randn(2, 4),), stages=2, replicas=replicas, micro_batch=2, micro_batches=2)
    loss, optimizer = nn.functional.cross_entropy, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return make_job(model(), plan, small.data, loss=loss, optimizer=optimizer, epochs=epochs, deadline_s=60.0)


class Limited(MemoryStorage):
    """A storage that says when the limit is reached: with the first put of which `at` says so, of key and number.

    Puts of messages are numbered. Those of which `loses` says so are lost, as those of a function that has died.
    """

    def __init__(self, at: Callable[[str, int], bool], loses: Callable[[str], bool] = lambda key: False) -> None:
        super().__init__()
        self._at, self._loses = at, loses
        self._messages = 0
        self.reached = threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self._messages += "/messages/" in key
        if self._at(key, self._messages):
            self.reached.set()
        if not self._loses(key):
            super().put(key, data, if_absent=if_absent, gate=gate)


def ends_at_limit(
    storage: Limited,
    patch: pytest.MonkeyPatch,
    *,
    made: Job | None = None,
    faults: FaultTolerance = FAULTS,
    platform: ThreadPlatform | None = None,
) -> int:
    """Run until the limit is reached: after how many steps it can be resumed, which all workers have done."""

    def exceeded(*_: object, **__: object) -> str | None:
        return "the limit is reached" if storage.reached.is_set() else None

    with patch.context() as patched:
        patched.setattr(BudgetGuard, "exceeded", exceeded)
        limits = RunLimits(deadline_s=3600.0)
        with pytest.raises(RunHalted, match="the limit is reached"):
            train(made or job(), storage, platform or threads(storage), faults=faults, limits=limits)
    own = signed(storage)
    record = newest_record(own, RUN)
    keys, plan = Keys.of(record), record.plan
    saved = read_index(own, keys, first_step=0).common_step(len(plan.stages), plan.replicas)
    reported = {int(key.removeprefix(keys.step_reports).partition(".")[0]) for key in own.list(keys.step_reports)}
    assert saved == max(reported) + 1, "a step that was paid for is repeated"
    return saved


def threads(storage: MemoryStorage) -> ThreadPlatform:
    return ThreadPlatform(load_spec("local"), storage)


def train(
    made: Job,
    storage: MemoryStorage,
    platform: ThreadPlatform,
    *,
    faults: FaultTolerance = FAULTS,
    limits: RunLimits = NO_LIMITS,
    settings: RunSettings = NAMED,
) -> Mapping[str, Tensor]:
    session = session_on(Site(platform, storage, "memory://"), reopen=platform.open)
    try:
        return launch(prepare(made, session, faults=faults, limits=limits, settings=settings)).state_dict()
    finally:
        platform.stop_all()


@pytest.mark.parametrize("message", [*range(81, 93, 2), *in_long_run(range(82, 93, 2))])
def test_a_limit_at_any_message_of_three_steps_repeats_none(message: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches make four messages a step: some workers have done one step more than others."""
    saved = ends_at_limit(Limited(lambda _, number: number == message), monkeypatch)
    assert 80 // 4 <= saved <= 92 // 4 + 2


@pytest.mark.parametrize("message", [70, 75])
def test_a_limit_repeats_none_with_replicas(message: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends_at_limit(Limited(lambda _, number: number == message), monkeypatch, made=job(replicas=2))


@pytest.mark.parametrize(
    "at", ["functions/s0.r0/00000001", "hand-overs/s0.r0/", "hand-overs/s1.r0/", "leases/s0.r0/00000001", "a00000001"]
)
def test_a_limit_in_a_hand_over_repeats_none(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of the first successor to the first checkpoint of one.

    Functions leave after a second of their minute: on a machine however busy, none is too late to hand over.
    """
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda lifetime_s, step_s, saving_s: 1.0)
    faults = FaultTolerance(heartbeat_s=0.3, lease_s=60.0, start_s=60.0, keep=True, lifetime_s=60.0, cold_start_s=0.1)
    made = job(epochs=4000)
    assert ends_at_limit(Limited(lambda key, _: at in key), monkeypatch, made=made, faults=faults) > 0


def test_a_limit_that_is_reached_while_all_wait_for_one_repeats_none_and_trains_on_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for a successor that takes long to come: forwards of the step that is cut short have changed buffers."""

    def of_step_13(key: str) -> bool:
        return "/messages/s0.r0/00000013/" in key

    ended = threading.Event()
    storage = Limited(lambda key, _: of_step_13(key), loses=lambda key: of_step_13(key) and not ended.is_set())
    platform = threads(storage)
    assert ends_at_limit(storage, monkeypatch, platform=platform) == 13
    ended.set()
    found = train(job(), storage, platform, settings=RunSettings(resume=RUN))
    undisturbed = MemoryStorage()
    expected = train(job(), undisturbed, threads(undisturbed))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
