"""What a checkpoint costs a worker, and how many messages lie there until readers have covered them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from funcpipe.platforms.base import Storage
from funcpipe.platforms.wrappers import Answer, StorageWrapper
from funcpipe.runstate.lease import FencedStorage, Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker import checkpoint_manager
from funcpipe.worker.checkpoint_manager import LATE_STEPS, CheckpointManager
from tests.support import races
from tests.support.races import FIRST, KEYS, SECOND, message, messages_of
from tests.support.run_keys import signed_for_tests

EVERY = 8


class Clock(StorageWrapper):
    """A storage of which each request takes a second, and the clock that tells so."""

    now_s = 0.0

    def __init__(self) -> None:
        super().__init__(MemoryStorage())

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        self.now_s += 1
        return request()

    def monotonic(self) -> float:
        """As of the module `time`."""
        return self.now_s

    thread_time = monotonic


class Recorded:
    """An interval of EVERY steps, and the costs that it was told of."""

    def __init__(self) -> None:
        self.costs_s: list[float] = [0.0]
        self.checkpoint_s = 0.0

    def steps(self) -> int:
        return EVERY

    def begin_checkpoint(self) -> None:
        self.costs_s.append(0.0)

    def record_cost(self, seconds: float) -> None:
        self.costs_s[-1] += seconds


def manager_on(
    storage: Storage, interval: Recorded, *, attempt: int = 0, replica: int = 0, replicas: int = 1
) -> CheckpointManager:
    """What saves the first stage."""
    made = races.spec_of((0, replica), attempt)
    spec = replace(made, plan=replace(made.plan, replicas=replicas, global_batch=replicas))
    own = signed_for_tests(storage)
    lease = Lease(own, KEYS, spec.worker, attempt, fresh_s=1e9)
    lease.take()
    computation = races.Learned()
    computation.shared_parameters = ()  # type: ignore[attr-defined]
    fenced = FencedStorage(own, lease)
    return CheckpointManager(
        spec,
        fenced,
        KEYS,
        lease=lease,
        computation=cast(Any, computation),
        interval=cast(Any, interval),
        steps=10 * EVERY,
    )


@pytest.mark.parametrize("replica", [0, 1])
def test_all_that_is_asked_for_a_checkpoint_is_a_cost(replica: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each worker, in the background too: the steps themselves ask for nothing here."""
    clock, interval = Clock(), Recorded()
    monkeypatch.setattr(checkpoint_manager, "time", clock)
    manager = manager_on(clock, interval, replica=replica, replicas=2)
    began_s = clock.now_s
    background: list[Callable[[], None]] = []
    for done in range(1, 2 * EVERY):
        manager.after_step(done, background.append)
        if done == EVERY:
            stopped_s = interval.costs_s[-1]
        for work in background:
            work()
        background.clear()
    assert len(interval.costs_s) == 2
    assert sum(interval.costs_s) == clock.now_s - began_s
    if replica == 0:
        assert interval.costs_s[1] > stopped_s == interval.checkpoint_s > 0
    else:
        assert interval.costs_s[1] > stopped_s == 0


@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_interval_of_messages_is_kept_and_those_of_few_steps_more(late: int) -> None:
    """A message is put in each step; its reader has saved its stage so many steps after the writer."""
    storage, most = MemoryStorage(), 0
    manager, own = manager_on(storage, Recorded()), signed_for_tests(storage)
    for done in range(1, 4 * EVERY):
        own.put(message(done - 1), b"")
        most = max(most, len(storage.list(KEYS.messages("s0.r0"))))
        manager.record_messages(done - 1, messages_of(FIRST, done - 1))
        manager.after_step(done, lambda work: work())
        if done % EVERY == late and done > late:
            races.save(own, SECOND, done - late)
    assert most == EVERY + late + 1 <= EVERY + LATE_STEPS
