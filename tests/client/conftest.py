from collections.abc import Iterator

import pytest

from funcpipe.client.follow import interruption
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from tests.client.held import HeldPlatform
from tests.client.threads import job


@pytest.fixture(scope="session")
def traced() -> None:
    """A model cannot be traced while threads draw random numbers in the same process."""
    job()


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def functions(storage: MemoryStorage) -> Iterator[HeldPlatform]:
    platform = HeldPlatform(load_spec("local"), storage)
    yield platform
    platform.stop_all()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that are held never save: nobody waits for them."""
    monkeypatch.setattr(interruption, "_LEAST_S", 0.0)
