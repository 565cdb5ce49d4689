"""A snapshot answers as the storage would, as of one look, and asks little."""

import pytest

from funcpipe.core import RequestCounts
from funcpipe.errors import KeyMissing
from funcpipe.runstate.snapshot import Snapshot
from funcpipe.testing.memory_storage import MemoryStorage

LEASES = "run-1/g0000-3fa9c2d1/leases/"
BEAT = "run-1/g0000-3fa9c2d1/heartbeats/s0.r0/00000000"
RECORD = "run-1/g0000-3fa9c2d1/run.json"


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    for key in (f"{LEASES}s0.r0/00000000", f"{LEASES}s1.r0/00000000", BEAT, RECORD):
        storage.put(key, key.encode())
    return storage


def test_folders_of_all_workers_are_listed_once_in_a_look(storage: MemoryStorage) -> None:
    snapshot = Snapshot(storage)
    assert snapshot.list(f"{LEASES}s0.r0/") == (f"{LEASES}s0.r0/00000000",)
    assert snapshot.list(f"{LEASES}s1.r0/") == (f"{LEASES}s1.r0/00000000",)
    assert snapshot.list(f"{LEASES}s2.r0/") == ()
    with pytest.raises(KeyMissing):
        snapshot.get(f"{LEASES}s0.r0/00000001")
    assert snapshot.asked == RequestCounts(lists=1)
    storage.put(f"{LEASES}s0.r0/00000001", b"next")
    assert len(snapshot.list(f"{LEASES}s0.r0/")) == 1
    snapshot.renew()
    assert snapshot.get(f"{LEASES}s0.r0/00000001") == b"next"
    assert snapshot.asked == RequestCounts(lists=2, gets=1)


def test_only_heartbeats_are_read_again(storage: MemoryStorage) -> None:
    snapshot = Snapshot(storage)
    for _ in range(2):
        assert snapshot.get(BEAT) == BEAT.encode()
        assert snapshot.get(RECORD) == RECORD.encode()
    storage.put(BEAT, b"later")
    assert snapshot.get(BEAT) == BEAT.encode()
    assert snapshot.asked == RequestCounts(lists=1, gets=2)
    snapshot.renew()
    assert snapshot.get(BEAT) == b"later"
    assert snapshot.get(RECORD) == RECORD.encode()
    assert snapshot.asked == RequestCounts(lists=2, gets=3)


def test_what_is_missing_is_asked_for_once_in_a_look(storage: MemoryStorage) -> None:
    snapshot, key = Snapshot(storage), "run-1/g0000-3fa9c2d1/finished.json"
    for _ in range(2):
        with pytest.raises(KeyMissing):
            snapshot.get(key)
    assert snapshot.asked == RequestCounts(gets=1, empty_gets=1)
    storage.put(key, b"done")
    snapshot.renew()
    assert snapshot.get(key) == b"done"


def test_nothing_is_written(storage: MemoryStorage) -> None:
    snapshot = Snapshot(storage)
    with pytest.raises(PermissionError, match="looked at"):
        snapshot.put(RECORD, b"")
    with pytest.raises(PermissionError, match="looked at"):
        snapshot.delete(RECORD)
    with pytest.raises(PermissionError, match="looked at"):
        snapshot.delete_many([RECORD])
    with pytest.raises(NotImplementedError):
        snapshot.get(RECORD, stop=3)
    assert storage.get(RECORD) == RECORD.encode()
