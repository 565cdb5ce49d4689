"""Which objects of a run are made young, by whom and how often."""

import logging
import threading
from collections.abc import Callable

import pytest

from funcpipe.errors import StorageBusy, Superseded
from funcpipe.runstate.functions import mark_detached
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.renewal import DAY_S, Renewal
from funcpipe.testing.memory_storage import MemoryStorage

KEYS = Keys("run-1", 0, "3fa9")


class Touched(MemoryStorage):
    """Notes what is touched; `before` is called before each touch."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []
        self.before: Callable[[str], None] = lambda key: None

    def touch(self, key: str) -> None:
        self.before(key)
        super().touch(key)
        self.keys.append(key)


NEEDED = (
    *(KEYS.reservation, *KEYS.records, KEYS.bundle(0), KEYS.parameters(0), KEYS.data("dataset.bundle")),
    *(KEYS.payload("s0.r0"), KEYS.message("s0.r0", 7, "put-activation.s0.r0.m0"), KEYS.halt, KEYS.verdict(0)),
    *(KEYS.checkpoint(0, "00000004.s0.r0.a00000000.json"), KEYS.step_report(7, "s1.r0"), KEYS.restart("s0.r0", 0)),
    *(KEYS.owner.owner_lease(0, "0a"), KEYS.owner.owner_heartbeat(0, "0a"), KEYS.done("s0.r0", 2, 0, 6)),
    *(KEYS.lease("s0.r0", 1), KEYS.lease("s0.r0", 2), KEYS.hand_over("s0.r0", 1), KEYS.trace("s0.r0", 1)),
    *(KEYS.function("s0.r0", attempt, "0a") for attempt in range(3)),
    *(KEYS.worker_report("s0.r0", 1), KEYS.worker_report("s0.r0", 0), KEYS.heartbeat("s1.r0", 0)),
    *(KEYS.lease("s1.r0", 0), KEYS.lease("s1.r0", 1), KEYS.heartbeat("s1.r0", 0)),
)
"""The first attempt of s1.r0 has died without a report: the bill goes by its heartbeat."""

LEFT = (
    *(KEYS.lease("s0.r0", 0), KEYS.heartbeat("s0.r0", 0), KEYS.hand_over("s0.r0", 0), KEYS.trace("s0.r0", 0)),
    *(KEYS.heartbeat("s0.r0", 1), KEYS.heartbeat("s0.r0", 2), KEYS.heartbeat("s1.r0", 1)),
)
OTHERS = ("run-1/2024/images.bin", "run-2/g0000-3fa9/run.json", "_watch/run-2/g0000-3fa9", "_watch/run-1/notes")


def filled() -> Touched:
    storage = Touched()
    for key in (*NEEDED, *LEFT, *OTHERS):
        storage.put(key, b"1")
    mark_detached(storage, KEYS, "")
    return storage


def renewed(storage: MemoryStorage, *run_s: float, keys: Keys | None = KEYS) -> int:
    """How many objects one function renews that looks when the run has taken so long, until that is done."""
    counts: list[int] = []
    with Renewal(storage, "run-1", keys=keys, renewed=counts.append) as renewal:
        for moment_s in run_s:
            renewal.renew_due(moment_s)
            if renewal._round is not None:
                renewal._round.result()
    return sum(counts)


def test_what_anybody_may_read_is_made_young_and_nothing_else() -> None:
    storage = filled()
    renewed(storage, DAY_S)
    assert set(storage.keys) == {*NEEDED, "_watch/run-1/g0000-3fa9"}
    assert len(storage.keys) == len(set(storage.keys))


def test_once_a_day_of_the_run_whoever_looks() -> None:
    storage = filled()
    assert renewed(storage, 0.0, 10.0, DAY_S - 1) == 0
    once = renewed(storage, DAY_S + 1, DAY_S + 2, 1.5 * DAY_S)
    assert once == len(set(NEEDED)) + 1
    assert storage.list(KEYS.renewals) == (KEYS.renewal(1),)
    assert renewed(storage, 1.7 * DAY_S) == 0  # a successor
    assert renewed(storage, 2.1 * DAY_S, 2.2 * DAY_S) == once + 1  # with the mark
    assert renewed(storage, 9 * DAY_S) == once + 1
    assert storage.list(KEYS.renewals) == (KEYS.renewal(9),)


def test_a_client_that_is_alone_leaves_no_mark() -> None:
    storage = filled()
    assert renewed(storage, DAY_S, 2.5 * DAY_S, keys=None) == 2 * (len(set(NEEDED)) + 1)
    assert storage.list(KEYS.renewals) == ()


def test_what_is_deleted_meanwhile_is_missed_and_what_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    storage = filled()
    gone = NEEDED[8]

    def delete(key: str) -> None:
        storage.delete(gone)

    storage.before = delete
    assert renewed(storage, DAY_S) <= len(set(NEEDED))
    assert storage.list(gone) == ()
    failures = [StorageBusy("not now")]

    def fail(key: str) -> None:
        if failures:
            raise failures.pop()

    storage.before = fail
    caplog.set_level(logging.INFO, logger="funcpipe")
    assert renewed(storage, 2 * DAY_S, 2 * DAY_S + 10) > 0
    assert "could not renew all objects on day 2 of the run, and tries again: not now" in caplog.text
    assert storage.list(KEYS.renewals) == (KEYS.renewal(2),)


def test_who_is_no_longer_the_worker_leaves_the_day_to_another() -> None:
    storage = filled()

    def lose(key: str) -> None:
        raise Superseded("attempt 3 of s0.r0 has begun")

    storage.before = lose
    assert renewed(storage, DAY_S) == 0
    assert storage.list(KEYS.renewals) == ()
    storage.before = lambda key: None
    assert renewed(storage, DAY_S) == len(set(NEEDED)) + 1


def test_who_leaves_in_the_middle_leaves_the_day_to_another() -> None:
    storage, begun, goes_on = filled(), threading.Event(), threading.Event()

    def hold(key: str) -> None:
        begun.set()
        assert goes_on.wait(60)

    storage.before = hold
    renewal = Renewal(storage, "run-1", keys=KEYS)
    renewal.renew_due(DAY_S)
    assert begun.wait(60)
    leaving = threading.Thread(target=renewal.__exit__)
    leaving.start()
    assert renewal._cancel.wait(60)
    goes_on.set()
    leaving.join(60)
    assert not leaving.is_alive()
    assert 0 < len(storage.keys) < len(set(NEEDED))
    assert storage.list(KEYS.renewals) == ()
