"""Failures that pass at a storage; those between real clients and servers are in `contract/test_faults.py`."""

import pytest

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.aws.s3 import S3Storage
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.wrappers import Retried
from funcpipe.testing.memory_storage import MemoryStorage


class Flaky(MemoryStorage):
    """Fails as often as told, before or after a request has had its effect."""

    def __init__(self, failures: int, *, after: bool = False) -> None:
        super().__init__()
        self.failures, self.after = failures, after

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if not self.after:
            self.fail()
        super().put(key, data, if_absent=if_absent, gate=gate)
        self.fail()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        self.fail()
        return super().get(key, start=start, stop=stop, gate=gate)

    def fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageBusy("later")


def retried(store: MemoryStorage, pauses: list[float]) -> Retried:
    return Retried(store, attempts=4, first_s=0.1, most_s=0.3, sleep=pauses.append, draw=lambda: 0.5)


def test_requests_are_made_again_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []
    caplog.set_level("INFO", logger="funcpipe")
    store = Flaky(3)
    retried(store, pauses).put("k", b"1")
    assert pauses == pytest.approx([0.05, 0.1, 0.15])
    assert store.get("k") == b"1"
    assert caplog.messages == [f"retry {n} of 3 in {pause_s:.2f} s: later" for n, pause_s in enumerate(pauses, 1)]
    with pytest.raises(KeyMissing):
        retried(store, pauses).get("none")


def test_a_storage_that_stays_busy_is_an_error() -> None:
    pauses: list[float] = []
    with pytest.raises(StorageBusy):
        retried(Flaky(4), pauses).get("k")
    assert len(pauses) == 3


def test_a_conditional_put_whose_answer_was_lost_has_succeeded() -> None:
    store = Flaky(1, after=True)
    retried(store, []).put("lease", b"mine", if_absent=True)
    assert store.get("lease") == b"mine"
    with pytest.raises(KeyExists):
        retried(store, []).put("lease", b"mine", if_absent=True)
    store.failures = 1
    store.after = False
    with pytest.raises(KeyExists):
        retried(store, []).put("lease", b"yours", if_absent=True)


def test_a_request_that_cannot_be_sent_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    pauses: list[float] = []
    with pytest.raises(StorageError, match="Invalid bucket name") as refused:
        Retried(S3Storage("no/bucket", endpoint="http://127.0.0.1:9"), sleep=pauses.append).get("k")
    assert not isinstance(refused.value, StorageBusy)
    assert pauses == []
