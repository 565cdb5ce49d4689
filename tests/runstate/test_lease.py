import threading

import pytest

from funcpipe.core import Outcome
from funcpipe.errors import Superseded
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import FencedStorage, LastAttempt, Lease, is_superseded, last_attempt, newest_attempt
from funcpipe.testing.memory_storage import MemoryStorage

KEYS = Keys("run-1")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def lease(storage: MemoryStorage, attempt: int, clock: Clock | None = None) -> Lease:
    return Lease(storage, KEYS, "s0.r0", attempt, fresh_s=5.0, clock=clock or Clock())


def test_of_two_functions_for_one_attempt_one_gets_the_lease() -> None:
    storage, got, left = MemoryStorage(), [], []

    def take() -> None:
        try:
            lease(storage, 0).take()
            got.append(1)
        except Superseded:
            left.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(left)) == (1, 7)


def test_a_later_attempt_shuts_out_the_one_before() -> None:
    storage, clock = MemoryStorage(), Clock()
    old = lease(storage, 0, clock)
    old.take()
    fenced = FencedStorage(storage, old)
    fenced.put("run-1/x", b"1")
    lease(storage, 1).take()
    fenced.put("run-1/x", b"2")  # what was checked a moment ago counts
    clock.now_s = 5.1  # as after a sleep
    with pytest.raises(Superseded, match=r"attempt 1 of s0.r0 has begun"):
        fenced.put("run-1/x", b"3")
    clock.now_s = 5.2
    with pytest.raises(Superseded):
        fenced.delete("run-1/x")
    assert storage.get("run-1/x") == b"2"
    assert newest_attempt(storage, KEYS, "s0.r0") == 1


def test_an_attempt_comes_too_late_when_a_later_one_has_begun() -> None:
    storage = MemoryStorage()
    lease(storage, 1).take()
    with pytest.raises(Superseded):
        lease(storage, 0).take()


def test_who_finds_its_lease_gone_stops() -> None:
    storage = MemoryStorage()
    held = lease(storage, 0)
    held.take()
    storage.delete(KEYS.lease("s0.r0", 0))
    for _ in range(2):
        with pytest.raises(
            Superseded,
            match=r"^the lease of attempt 0 of s0\.r0 is missing: the run was collected or deleted, the storage",
        ) as lost:
            held.check_now()
        assert lost.value.missing


def test_nobody_has_a_lease_at_first() -> None:
    assert newest_attempt(MemoryStorage(), KEYS, "s0.r0") is None


def test_who_ends_the_worker_for_good_can_have_no_successor() -> None:
    storage = MemoryStorage()
    held = lease(storage, 0)
    held.take()
    assert last_attempt(storage, KEYS, "s0.r0") == LastAttempt(0, None)
    held.close(Outcome.FINISHED)
    assert last_attempt(storage, KEYS, "s0.r0") == LastAttempt(0, Outcome.FINISHED)
    for attempt in (1, 2):
        with pytest.raises(Superseded):
            lease(storage, attempt).take()
    assert not is_superseded(storage, KEYS, "s0.r0", 0)


def test_who_has_a_successor_cannot_end_the_worker() -> None:
    storage = MemoryStorage()
    old, new = lease(storage, 0), lease(storage, 1)
    old.take()
    new.take()
    with pytest.raises(Superseded):
        old.close(Outcome.FAILED)
    assert last_attempt(storage, KEYS, "s0.r0") == LastAttempt(1, None)
    assert is_superseded(storage, KEYS, "s0.r0", 0)
    new.close(Outcome.HALTED)
    assert last_attempt(storage, KEYS, "s0.r0") == LastAttempt(1, Outcome.HALTED)


class SupersededAtTheLastMoment(MemoryStorage):
    """A storage where attempt 1 begins between the last check of attempt 0 and its last entry."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if key == KEYS.lease("s0.r0", 1) and b"failed" in bytes(data):
            lease(self, 1).take()
        super().put(key, data, if_absent=if_absent, gate=gate)


def test_a_successor_that_begins_between_check_and_put_wins() -> None:
    storage = SupersededAtTheLastMoment()
    old = lease(storage, 0)
    old.take()
    with pytest.raises(Superseded, match="attempt 1 of"):
        old.close(Outcome.FAILED)
    assert last_attempt(storage, KEYS, "s0.r0") == LastAttempt(1, None)


def test_a_lease_that_is_damaged_is_still_held_by_who_took_it() -> None:
    storage = MemoryStorage()
    held = lease(storage, 0)
    held.take()
    storage.put(KEYS.lease("s0.r0", 0), b"damaged")
    held.check_now()
    assert last_attempt(storage, KEYS, "s0.r0") == LastAttempt(0, None)
    lease(storage, 1).take()
    with pytest.raises(Superseded):
        held.check_now()
