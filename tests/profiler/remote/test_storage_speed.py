"""What is measured of a storage, with a clock that the storage moves on."""

import statistics
from itertools import count

import pytest

from funcpipe.platforms.base import OPEN, Gate
from funcpipe.profiler.remote import storage_speed
from funcpipe.profiler.remote.storage_speed import REQUESTS, measure_storage
from funcpipe.testing.memory_storage import MemoryStorage

UPLOAD_BYTES_S, DOWNLOAD_BYTES_S, EMPTY_S = 4e6, 1e7, 0.005


class Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class SharedLink(MemoryStorage):
    """Streams share a link, one body after the other; the n-th small put takes n milliseconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._puts = count()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        with self._lock:
            self._clock.now_s += next(self._puts) / 1000 if len(data) == 1 else len(data) / UPLOAD_BYTES_S

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        with self._lock:
            self._clock.now_s += EMPTY_S
        data = super().get(key, start=start, stop=stop, gate=gate)
        with self._lock:
            self._clock.now_s += len(data) / DOWNLOAD_BYTES_S
        return data


def test_latencies_and_bandwidths_are_those_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(storage_speed, "time", clock)
    storage = SharedLink(clock)
    report = measure_storage(storage, "memory:", streams=4, body_bytes=4_000_000)
    puts_s = [number / 1000 for number in range(1, REQUESTS + 1)]  # the one before has made the connection
    assert report.put.median_s == pytest.approx(statistics.median(puts_s))
    assert sum(second <= report.put.p95_s for second in puts_s) == 0.95 * REQUESTS
    assert report.get.median_s == report.get.p95_s == pytest.approx(EMPTY_S + 1 / DOWNLOAD_BYTES_S)
    assert report.empty_get.median_s == pytest.approx(EMPTY_S)
    assert report.upload_bytes_s == pytest.approx(UPLOAD_BYTES_S)
    assert report.download_bytes_s == pytest.approx(DOWNLOAD_BYTES_S)
    assert report.upload_together_bytes_s == pytest.approx(UPLOAD_BYTES_S)
    assert report.download_together_bytes_s == pytest.approx(DOWNLOAD_BYTES_S)
    assert storage.list("") == ()
