"""What steps do not change, as a device's state on the host, is written while they go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.lease import FencedStorage, Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.device import Device
from funcpipe.training.state import StageState
from funcpipe.worker.checkpoint_manager import CheckpointManager
from tests.support import races
from tests.support.races import FIRST, KEYS, value_in
from tests.support.run_keys import signed_for_tests
from tests.worker.test_checkpoint_costs import EVERY, Recorded


class Copied(races.Learned):
    """Learns on a device, and notes when its copy on the host is in use."""

    device = Device(torch.device("meta"))

    def __init__(self, *, rounds: bool = False) -> None:
        super().__init__()
        self.in_use: list[bool] = []
        self._rounds = rounds

    def feedback(self) -> object | None:
        return object() if self._rounds else None

    @contextmanager
    def _copy(self, state: StageState) -> Iterator[StageState]:
        self.in_use.append(True)
        try:
            yield state
        finally:
            self.in_use.append(False)

    def begin_state(self) -> Any:
        return self._copy(races.state_of(self.value))


class Failing(MemoryStorage):
    """Takes no files of checkpoints while it `fails`."""

    fails = False

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if self.fails and key.endswith(".safetensors"):
            raise KeyMissing(key)
        super().put(key, data, if_absent=if_absent, gate=gate)


def manager_of(learned: Copied, storage: MemoryStorage) -> CheckpointManager:
    own, spec = signed_for_tests(storage), races.spec_of(FIRST, 0)
    lease = Lease(own, KEYS, spec.worker, 0, fresh_s=1e9)
    lease.take()
    parts = {"lease": lease, "computation": learned, "interval": Recorded(), "steps": 10 * EVERY}
    return CheckpointManager(spec, FencedStorage(own, lease), KEYS, **cast(Any, parts))


def files(storage: MemoryStorage) -> list[str]:
    return [key for key in storage.list(KEYS.checkpoints) if key.endswith(".safetensors")]


def test_a_state_that_steps_do_not_change_is_written_in_the_background_and_published_after_that() -> None:
    learned, storage, background = Copied(), MemoryStorage(), list[Callable[[], None]]()
    manager = manager_of(learned, storage)
    learned.value = 7
    manager.after_step(EVERY, background.append)
    assert (files(storage), learned.in_use) == ([], [])
    assert manager.newest_step == EVERY
    learned.value = 8  # of a step since
    for work in background:
        work()
    assert learned.in_use == [True, False]
    step, state = Checkpoints(signed_for_tests(storage), KEYS).load_latest(FIRST)
    assert state is not None
    assert (step, value_in(state)) == (EVERY, 7)


def test_with_rounding_errors_that_steps_change_it_is_written_at_once() -> None:
    learned, storage, background = Copied(rounds=True), MemoryStorage(), list[Callable[[], None]]()
    manager_of(learned, storage).save(EVERY, background.append)
    assert len(files(storage)) == 1
    assert learned.in_use == [True, False]


def test_what_could_not_be_written_is_not_published_and_its_copy_is_free_again() -> None:
    learned, storage, background = Copied(), Failing(), list[Callable[[], None]]()
    manager = manager_of(learned, storage)
    manager.save(EVERY, background.append)
    storage.fails = True
    with pytest.raises(KeyMissing):
        background[0]()
    assert learned.in_use == [True, False]
    assert not storage.list(KEYS.checkpoints)
