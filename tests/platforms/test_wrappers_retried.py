"""Failures that pass at a storage; those between real clients and servers are in `contract/test_faults.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms import base, catalog
from funcpipe.platforms import entry as function
from funcpipe.platforms.aws.s3 import S3Storage
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import Answer, StorageWrapper
from funcpipe.testing.memory_storage import MemoryStorage
from tests.retries import Pauses, retried


class Flaky(StorageWrapper):
    """Fails as often as told, before or after a request has had its effect."""

    def __init__(self, failures: int, *, after: bool = False) -> None:
        super().__init__(MemoryStorage())
        self.failures, self.after = failures, after
        self.batches: list[int] = []

    def delete_many(self, keys: Sequence[str]) -> None:
        self.batches.append(len(keys))
        super().delete_many(keys)

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        if not self.after:
            self.fail()
        result = request()
        self.fail()
        return result

    def fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageBusy("later")


REQUESTS: dict[str, Callable[[Storage], object]] = {
    "put": lambda store: store.put("k", b"2"),
    "put if absent": lambda store: store.put("new", b"2", if_absent=True),
    "get": lambda store: store.get("k"),
    "delete": lambda store: store.delete("k"),
    "delete many": lambda store: store.delete_many(["k"]),
    "list": lambda store: store.list("k"),
    "touch": lambda store: store.touch("k"),
}


def filled(failures: int) -> Flaky:
    store = Flaky(0)
    store.put("k", b"1")
    store.failures = failures
    return store


@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_request_outlasts_trouble_of_a_minute(request_name: str) -> None:
    undisturbed, disturbed, pauses = filled(0), filled(16), Pauses()
    expected = REQUESTS[request_name](undisturbed)
    assert REQUESTS[request_name](retried(disturbed, deadline_s=120.0, pauses=pauses)) == expected
    assert disturbed.list("") == undisturbed.list("")
    assert pauses.now_s() > 50


def test_requests_are_made_again_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    pauses = Pauses()
    caplog.set_level("INFO", logger="funcpipe")
    store = Flaky(3)
    retried(store, pauses=pauses, draw=0.5, most_s=0.3).put("k", b"1")
    assert pauses.made == pytest.approx([0.05, 0.1, 0.15])
    assert store.get("k") == b"1"
    assert caplog.messages[0] == "put k: tried again in 0.05 s, for 1 s more: later"
    assert len(caplog.messages) == 3
    with pytest.raises(KeyMissing):
        retried(store, pauses=pauses).get("none")


def test_people_are_told_of_a_storage_that_fails_for_long(caplog: pytest.LogCaptureFixture) -> None:
    retried(Flaky(7), deadline_s=60.0).list("")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "list : tried again in 5.00 s, for 54 s more: later"
    ]


def test_a_storage_that_stays_busy_is_an_error_that_says_for_how_long() -> None:
    pauses = Pauses()
    with pytest.raises(StorageBusy, match=r"get k: the storage failed for 10 s, 10 times: later"):
        retried(Flaky(100), deadline_s=10.0, pauses=pauses, most_s=2.0).get("k")
    assert pauses.made == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 0.9])  # the last ends at the deadline


def test_a_conditional_put_whose_answer_was_lost_has_succeeded() -> None:
    store = Flaky(1, after=True)
    retried(store).put("lease", b"mine", if_absent=True)
    assert store.get("lease") == b"mine"
    with pytest.raises(KeyExists):
        retried(store).put("lease", b"mine", if_absent=True)
    store.failures = 1
    store.after = False
    with pytest.raises(KeyExists):
        retried(store).put("lease", b"yours", if_absent=True)


def test_a_conditional_put_does_not_claim_what_was_deleted_since() -> None:
    class Cleaned(Flaky):
        """Its objects are deleted by others as soon as they were in the way."""

        def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
            raise KeyMissing(key)

    with pytest.raises(KeyExists):
        retried(Cleaned(1, after=True)).put("lease", b"mine", if_absent=True)


def test_of_many_objects_only_the_batch_that_failed_is_deleted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "DELETE_BATCH", 2)
    store = Flaky(0)
    for key in "abcde":
        store.put(key, b"")
    store.failures = 1
    retried(store).delete_many(list("abcde"))
    assert store.list("") == ()
    assert store.batches == [2, 2, 2, 1]


def test_a_request_that_cannot_be_sent_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    pauses = Pauses()
    with pytest.raises(StorageError, match="Invalid bucket name") as refused:
        retried(S3Storage("no/bucket", endpoint="http://127.0.0.1:9"), pauses=pauses).get("k")
    assert not isinstance(refused.value, StorageBusy)
    assert pauses.made == []


def test_a_storage_that_has_never_answered_is_given_up_soon() -> None:
    """Its URL is wrong, or the network is: a client need not wait for minutes."""
    pauses = Pauses()
    message = r"^list : the storage has not answered once in 15 s, \d+ times: later; is its URL right, and .* it\?$"
    with pytest.raises(StorageBusy, match=message):
        retried(Flaky(1000), deadline_s=300.0, first_s=15.0, pauses=pauses).list("")
    assert 15 <= pauses.now_s() < 16


@pytest.mark.parametrize("request_name", REQUESTS)
def test_one_that_has_answered_is_trusted_for_longer(request_name: str) -> None:
    """Also if it has answered that there is no such object, or that there is one already."""
    pauses, store = Pauses(), filled(0)
    careful = retried(store, deadline_s=300.0, first_s=15.0, pauses=pauses)
    with pytest.raises(KeyMissing):
        careful.get("none")
    store.failures = 1000
    with pytest.raises(StorageBusy, match="the storage failed for 300 s"):
        REQUESTS[request_name](careful)


def test_functions_trust_their_storage_and_clients_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def noted(store: Storage, *, first_s: float | None, **_: Any) -> Storage:
        limits.append(first_s)
        return store

    monkeypatch.setattr(catalog, "Retried", noted)
    monkeypatch.setattr(
        "funcpipe.worker.invocation.main", lambda payload, *, open_storage, **_: open_storage(payload, retry_s=300.0)
    )
    catalog.open_storage(tmp_path.as_uri(), retry_s=300.0)
    function.main(tmp_path.as_uri())
    assert limits == [catalog.FIRST_S, None]
