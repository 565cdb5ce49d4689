"""All workers end after the same step, and no order of a worker that was superseded ends a run."""

import pytest

from funcpipe.core import Halt, HandOver
from funcpipe.errors import RunHalted, Superseded
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.halt import halt_run, read_halt, read_verdict
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.heartbeat import HaltOrders

KEYS = Keys("run-1")
BUDGET = Halt(reason="too expensive", step=7)


def lease(storage: MemoryStorage, worker: str, attempt: int = 0) -> Lease:
    held = Lease(storage, KEYS, worker, attempt, fresh_s=0.0)
    held.take()
    return held


def orders(storage: MemoryStorage, worker: str, attempt: int = 0) -> HaltOrders:
    return HaltOrders(storage, KEYS, lease(storage, worker, attempt), notice_steps=lambda: 3)


def ends_after(worker: HaltOrders, first: int = 0, *, looks: bool = True) -> int:
    """After how many steps it ends, if it looks for orders before each."""
    for step in range(first, 100):
        if looks:
            assert worker.poll() is None
        if worker.end_before(step):
            return step
    return 100


def test_all_workers_end_after_the_step_that_one_of_them_orders() -> None:
    storage = MemoryStorage()
    one, other = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    one.give(BUDGET)
    other.give(Halt(reason="too late", step=5))
    assert [ends_after(one), ends_after(other)] == [7, 7]
    assert read_halt(storage, KEYS) == Halt(reason="too expensive", step=7, worker="s0.r0", attempt=0)


def test_an_order_that_comes_too_late_for_somebody_is_obeyed_by_nobody() -> None:
    storage = MemoryStorage()
    late, in_time = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    for step in range(9):
        assert not late.end_before(step)
    lease(storage, "s2.r0").check()
    halt_run(storage, KEYS, Halt(reason="too expensive", step=7, worker="s2.r0", attempt=0))
    assert in_time.poll() is None
    assert late.poll() is None
    assert ends_after(in_time, looks=False) == 100
    assert read_halt(storage, KEYS) is None


def test_a_client_s_order_that_comes_too_late_is_given_again_for_a_later_step() -> None:
    storage = MemoryStorage()
    late, in_time = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    for step in range(9):
        assert not late.end_before(step)
    halt_run(storage, KEYS, Halt(reason="it was stopped", step=7))
    assert late.poll() is None
    assert [ends_after(late, 9), ends_after(in_time)] == [12, 12]


def test_an_order_that_was_cut_short_is_done_without_and_given_again() -> None:
    storage = MemoryStorage()
    one, other = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    halt_run(storage, KEYS, BUDGET)
    data = storage.get(KEYS.order(0))
    storage.put(KEYS.order(0), data[: len(data) // 2])
    for worker in (one, other):
        assert worker.poll() is None
        assert not worker.end_before(3)
    assert halt_run(storage, KEYS, BUDGET) == BUDGET
    assert [ends_after(one, 4), ends_after(other, 4)] == [7, 7]


class Asleep(MemoryStorage):
    """A storage at which the first order is put only after `wake` was called: its giver sleeps before."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if key == KEYS.order(0) and not self.list(KEYS.lease("s0.r0", 1)):
            lease(self, "s0.r0", 1)
        super().put(key, data, if_absent=if_absent, gate=gate)


@pytest.mark.parametrize("step", [7, None])
def test_an_order_that_was_put_in_the_sleep_between_check_and_put_does_not_hold(step: int | None) -> None:
    storage = Asleep()
    sleeper, other = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    sleeper.give(Halt(reason="too expensive", step=step))
    assert storage.list(KEYS.order(0))
    assert ends_after(other) == 100
    assert read_verdict(storage, KEYS, 0) is False
    orders(storage, "s2.r0").give(BUDGET)
    assert ends_after(orders(storage, "s3.r0")) == 7


def test_who_was_superseded_gives_no_order() -> None:
    storage = MemoryStorage()
    old = orders(storage, "s0.r0")
    lease(storage, "s0.r0", 1)
    with pytest.raises(Superseded):
        old.give(BUDGET)
    assert read_halt(storage, KEYS) is None


def test_an_order_to_end_at_once_overrules_one_to_end_after_a_step() -> None:
    storage = MemoryStorage()
    worker, other = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    worker.give(BUDGET)
    other.give(Halt(reason="failed"))
    worker.poll()
    assert worker.poll() == "failed"
    halt = read_halt(storage, KEYS)
    assert halt is not None
    assert halt.reason == "failed"


def test_a_failure_that_another_one_has_ended_the_run_for_changes_nothing() -> None:
    storage = MemoryStorage()
    first, second = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    first.give(Halt(reason="failed"))
    second.give(Halt(reason="failed too"))
    assert second.poll() == "failed"
    assert storage.list(KEYS.order(1)) == ()


def test_an_order_of_an_attempt_that_has_handed_over_holds() -> None:
    """It was given before: whoever hands over does nothing afterwards."""
    storage = MemoryStorage()
    leaving, other = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    leaving.give(BUDGET)
    put_document(storage, KEYS.hand_over("s0.r0", 0), HandOver(step=5))
    successor = orders(storage, "s0.r0", 1)
    assert [ends_after(other), ends_after(successor, 5)] == [7, 7]


def test_a_worker_that_is_to_end_looks_before_each_step_whether_it_must_at_once() -> None:
    storage = MemoryStorage()
    one, other = orders(storage, "s0.r0"), orders(storage, "s1.r0")
    one.give(BUDGET)
    other.poll()
    assert not other.end_before(3)
    assert other.last_step == 7
    one.give(Halt(reason="it has become too slow"))
    for worker in (one, other):
        with pytest.raises(RunHalted, match="it has become too slow"):
            worker.end_before(4)
