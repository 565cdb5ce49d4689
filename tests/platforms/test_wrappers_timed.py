"""A storage that makes runs slow is told of, once."""

from pathlib import Path

import pytest

from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.wrappers import Timed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.platforms.clock import Clock


class Distant(MemoryStorage):
    """A storage whose answers take `answers_s`, and whose reads find nothing for `lag_s` after it was written."""

    def __init__(self, clock: Clock, *, answers_s: float = 0.0, lag_s: float = 0.0) -> None:
        super().__init__()
        self.clock, self.answers_s, self.lag_s = clock, answers_s, lag_s
        self.written: dict[str, float] = {}

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self.clock.now_s += self.answers_s
        super().put(key, data, if_absent=if_absent, gate=gate)
        self.written[key] = self.clock.now_s

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        self.clock.now_s += self.answers_s
        if self.clock.now_s - self.written.get(key, -1e9) < self.lag_s:
            raise KeyMissing(key)
        return super().get(key, start=start, stop=stop, gate=gate)


def use(storage: Timed, times: int, *, body: bytes = b"small") -> None:
    for number in range(times):
        storage.put(f"k{number}", body)
        storage.get(f"k{number}")


@pytest.mark.parametrize(("answers_s", "told"), [(0.9, False), (1.5, True)])
def test_a_storage_that_answers_slowly_is_told_of_once(
    answers_s: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    storage = Timed(Distant(clock, answers_s=answers_s), "s3://bucket", clock=clock)
    use(storage, 4)
    assert caplog.text == ""
    use(storage, 30)
    said = "s3://bucket answers slowly: 10 of the last 10 answers with little or no data took longer than 1 s"
    assert caplog.text.count("answers slowly") == caplog.text.count(said) == int(told)
    with pytest.raises(KeyMissing):
        storage.get("nothing")
    assert "lag" not in caplog.text


def test_large_objects_may_take_their_time_and_single_answers_too(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    distant = Distant(clock, answers_s=30.0)
    storage = Timed(distant, "s3://bucket", clock=clock)
    use(storage, 30, body=bytes(100_000))
    for number in range(60):
        distant.answers_s = 0.01 if number % 3 else 5.0
        storage.put(f"k{number}", b"")
    assert caplog.text == ""


def test_reads_that_lag_behind_writes_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    storage = Timed(Distant(clock, answers_s=0.1, lag_s=2.0), "s3://bucket", clock=clock)
    for key in ("a", "b"):
        storage.put(key, b"")
        with pytest.raises(KeyMissing):
            storage.get(key)
    (line,) = caplog.messages
    assert line.startswith("reads of s3://bucket lag behind writes: a is not found 0.0 s after it was written")
    clock.now_s += 2.0
    assert storage.get("a") == b""


def test_what_was_deleted_or_never_written_may_be_missing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    store = MemoryStorage()
    storage = Timed(store, "s3://bucket", clock=clock)
    for key in ("one", "two", "three", "old"):
        storage.put(key, b"")
    storage.delete("one")
    storage.delete_many(["two", "three"])
    store.delete("old")  # by another process
    clock.now_s += 3600
    for key in ("one", "two", "three", "old", "another's"):
        with pytest.raises(KeyMissing):
            storage.get(key)
    assert caplog.text == ""


def test_every_storage_that_is_opened_is_timed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = open_storage(tmp_path.as_uri())
    storage.put("k", b"")
    (tmp_path / "k").unlink()
    with pytest.raises(KeyMissing):
        storage.get("k")
    assert f"reads of {tmp_path.as_uri()} lag behind writes" in caplog.text
