"""What marks and deletions of checkpoints ask of the storage: nothing twice, and enough to leave nothing behind."""

from collections import Counter
from collections.abc import Sequence

import pytest
from torch import nn

from funcpipe.core import worker_name
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import capture_state

KEYS = Keys("run-1")
WORKER = (0, 1)


class Counted(MemoryStorage):
    """Counts requests by what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self.requests["put"] += 1
        super().put(key, data, if_absent=if_absent, gate=gate)

    def delete_many(self, keys: Sequence[str]) -> None:
        self.requests["delete"] += 1
        super().delete_many(keys)

    def list(self, prefix: str) -> tuple[str, ...]:
        self.requests["list"] += 1
        return super().list(prefix)


def marks(storage: MemoryStorage) -> list[tuple[int, int]]:
    """The attempt and step of each mark of the worker."""
    found = (key.rpartition("/")[2].split(".") for key in storage.list(KEYS.progress(worker_name(*WORKER))))
    return [(int(attempt), int(step)) for attempt, _, step in found]


def test_an_attempt_lists_the_marks_of_its_worker_once() -> None:
    storage = Counted()
    checkpoints = Checkpoints(storage, KEYS)
    for step in range(1, 11):
        checkpoints.mark_done(WORKER, step)
    assert storage.requests == {"put": 10, "delete": 8, "list": 1}
    assert marks(storage) == [(0, 9), (0, 10)]


def test_marks_of_attempts_before_are_deleted() -> None:
    storage = Counted()
    Checkpoints(storage, KEYS).mark_done(WORKER, 2)
    old, new = (Checkpoints(storage, KEYS, attempt=attempt) for attempt in (1, 2))
    old.take_over_marks(WORKER)
    old.mark_done(WORKER, 4)
    new.take_over_marks(WORKER)
    for step in (6, 8, 10):
        new.mark_done(WORKER, step)
    assert marks(storage) == [(2, 8), (2, 10)]


def test_a_mark_that_an_attempt_before_puts_late_does_not_count_and_is_deleted_by_the_next() -> None:
    storage = Counted()
    old, new, next_one = (Checkpoints(storage, KEYS, attempt=attempt) for attempt in range(3))
    old.mark_done(WORKER, 2)
    new.take_over_marks(WORKER)
    new.mark_done(WORKER, 4)
    old.mark_done(WORKER, 6)
    assert new.index().done == {WORKER: 4}
    new.mark_done(WORKER, 8)
    assert new.index().done == {WORKER: 8}
    assert marks(storage) == [(0, 6), (1, 4), (1, 8)]
    next_one.take_over_marks(WORKER)
    next_one.mark_done(WORKER, 10)
    next_one.mark_done(WORKER, 12)
    assert marks(storage) == [(2, 10), (2, 12)]


def test_a_worker_that_goes_back_marks_the_steps_again() -> None:
    storage = Counted()
    checkpoints = Checkpoints(storage, KEYS)
    for step in (2, 4, 6, 4, 6, 8):
        if step == 4:
            checkpoints.take_over_marks(WORKER)
        checkpoints.mark_done(WORKER, step)
        assert step in {marked for _, marked in marks(storage)}
    assert marks(storage) == [(0, 6), (0, 8)]


@pytest.mark.parametrize("attempt", [0, 1], ids=["goes back", "is restarted"])
def test_a_worker_that_repeats_steps_restarts_before_them_until_it_dies(attempt: int) -> None:
    """It has done eight steps, of which its stage's checkpoint is published while it repeats them from the fourth."""
    storage, state = MemoryStorage(), capture_state(nn.Linear(3, 2), None, GradientNorm())
    first = Checkpoints(storage, KEYS)
    first.save(0, 4, state, writer="s0.r0.a0")
    first.mark_done(WORKER, 8)
    worker = Checkpoints(storage, KEYS, attempt=attempt) if attempt else first
    worker.take_over_marks(WORKER)
    Checkpoints(storage, KEYS).save(0, 8, state, writer="s0.r0.a0")
    for step in (5, 6):
        assert worker.index().restart_step(WORKER) == 4
        worker.mark_done(WORKER, step)
    successor = Checkpoints(storage, KEYS, attempt=attempt + 1)
    successor.take_over_marks(WORKER)
    assert successor.index().restart_step(WORKER) == 8


def test_checkpoints_are_deleted_by_the_names_that_are_known() -> None:
    storage = Counted()
    checkpoints = Checkpoints(storage, KEYS, file_bytes=8)
    state = capture_state(nn.Linear(3, 2), None, GradientNorm())
    for writer in ("s0.r0.a0", "s0.r0.a00"):
        for step in (1, 2):
            checkpoints.save(0, step, state, writer=writer)
    index = checkpoints.index()
    assert len(index.files[0]) >= 8
    storage.requests.clear()
    checkpoints.delete(0, ("00000001.s0.r0.a0.json",), index)
    assert storage.requests == {"delete": 2}
    left = checkpoints.index()
    assert [name for _, name in left.saved[0]] == [
        "00000001.s0.r0.a00.json",
        "00000002.s0.r0.a0.json",
        "00000002.s0.r0.a00.json",
    ]
    assert len(left.files[0]) == len(index.files[0]) * 3 // 4
    for _, name in left.saved[0]:
        checkpoints.load(0, name)
