"""The storage that fails on purpose does so as often as it is told, and not otherwise."""

import pytest

from funcpipe.errors import InvalidValue, KeyMissing, StorageBusy
from funcpipe.platforms.base import Storage
from funcpipe.testing.faulty_storage import FaultyStorage, StorageFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.storage_contract import StorageContract


class TestWithoutStorageFaults(StorageContract):
    @pytest.fixture
    def store(self) -> Storage:
        return FaultyStorage(MemoryStorage(), StorageFaults())


def faulty(**faults: float) -> tuple[FaultyStorage, MemoryStorage, list[float]]:
    store, pauses = MemoryStorage(), list[float]()
    return FaultyStorage(store, StorageFaults(**faults), sleep=pauses.append), store, pauses


def test_what_is_refused_is_not_done() -> None:
    store, kept, _ = faulty(refused=1.0)
    for act in (lambda: store.put("k", b"1"), lambda: store.delete("k"), lambda: store.list("")):
        with pytest.raises(StorageBusy, match="refused on purpose"):
            act()
    assert kept.list("") == ()
    assert store.counts == {"refused": 3, "lost": 0, "missed": 0, "truncated": 0, "flipped": 0, "delayed": 0}


def test_what_is_lost_is_done() -> None:
    store, kept, _ = faulty(lost=1.0)
    with pytest.raises(StorageBusy, match="put k: the answer was lost"):
        store.put("k", b"1")
    assert kept.get("k") == b"1"
    with pytest.raises(KeyMissing):
        store.get("none")


def test_what_is_damaged_is_cut_or_has_a_wrong_bit() -> None:
    for name in ("truncated", "flipped"):
        store, kept, _ = faulty(**{name: 1.0})
        kept.put("k", bytes(100))
        kept.put("empty", b"")
        got = [store.get("k") for _ in range(50)]
        assert all(len(data) < 100 if name == "truncated" else len(data) == 100 for data in got)
        assert all(sum(map(int.bit_count, data)) == (name == "flipped") for data in got)
        assert store.get("empty") == b""


def test_what_is_missed_is_there() -> None:
    store, kept, _ = faulty(missed=1.0)
    store.put("k", b"1")
    with pytest.raises(KeyMissing):
        store.get("k")
    assert kept.get("k") == b"1"


def test_what_is_delayed_takes_longer_and_a_share_is_a_share() -> None:
    store, _, pauses = faulty(delayed=0.25, delay_s=3.0)
    for number in range(400):
        store.put(str(number), b"")
    assert set(pauses) == {3.0}
    assert 60 < len(pauses) < 140
    with pytest.raises(InvalidValue, match="refused must be a share between 0 and 1"):
        StorageFaults(refused=2)
