"""What functions and clients measure of a storage, and functions of their machine; storages move the clock on."""

import itertools
import statistics
from itertools import count
from types import SimpleNamespace

import pytest

from funcpipe.platforms.base import OPEN, Gate
from funcpipe.profiler.remote import function, storage_speed
from funcpipe.profiler.remote.storage_speed import REQUESTS, measure_storage
from funcpipe.testing.memory_storage import MemoryStorage

LATENCY_S, UPLOAD_BYTES_S, DOWNLOAD_BYTES_S, EMPTY_S = 0.02, 4e6, 1e7, 0.005


class Clock:
    """A clock that requests move on."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class TimedStorage(MemoryStorage):
    """A storage whose requests take a latency, and a second for each so many bytes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self._clock.now_s += LATENCY_S + (len(data) - 1) / UPLOAD_BYTES_S
        super().put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        data = super().get(key, start=start, stop=stop, gate=gate)
        self._clock.now_s += LATENCY_S + (len(data) - 1) / DOWNLOAD_BYTES_S
        return data


def test_latency_and_bandwidths_are_those_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    storage = TimedStorage(clock)
    monkeypatch.setattr(storage_speed, "time", clock)
    monkeypatch.setattr(function, "_products_s", lambda threads: 1.0 / threads)
    monkeypatch.setattr(function, "peak_memory_bytes", lambda: 210 << 20)  # not what other tests have left
    report = function.measure_machine(storage, "scratch", started_at_s=5.0, memory_bytes=64 << 20)
    assert report.latency_s == pytest.approx(LATENCY_S)
    assert report.upload_bytes_s == pytest.approx(UPLOAD_BYTES_S)
    assert report.download_bytes_s == pytest.approx(DOWNLOAD_BYTES_S)
    assert (report.started_at_s, report.one_thread_s) == (5.0, 1.0)
    assert report.base_memory_bytes == 210 << 20
    assert storage.list("") == ()


@pytest.mark.parametrize("disturbed", [2, 10])
def test_small_transfers_that_are_disturbed_do_not_make_the_bandwidth_larger(
    disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, delays = Clock(), itertools.cycle([*[0.2] * disturbed, 0.0])
    monkeypatch.setattr(storage_speed, "time", clock)

    def move(body: bytes) -> None:
        is_small = len(body) < 4_000_000
        clock.now_s += LATENCY_S + len(body) / DOWNLOAD_BYTES_S + (next(delays) if is_small else 0.0)

    found, _ = storage_speed.bandwidth(move, bytes(8_000_000), most=8_000_000)
    assert found == pytest.approx(DOWNLOAD_BYTES_S)


def test_the_share_of_the_memory_limits_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    clock = Clock()
    monkeypatch.setattr(storage_speed, "time", clock)

    def move(body: bytes) -> None:
        sizes.append(len(body))
        clock.now_s += 1e-3

    storage_speed.bandwidth(move, b"0" * 1000, most=3000)
    assert set(sizes) == {1000, 2000, 500}


def test_matrix_products_are_counted_for_the_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(function, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(function, "_COMPUTE_S", 3.0)
    assert function._products_s(1) == 1.5  # two products begin within three ticks


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
