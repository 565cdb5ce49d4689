"""Measure, in a function, the platform that it runs on."""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from funcpipe.core import MachineReport
from funcpipe.platforms.base import Storage
from funcpipe.platforms.process import peak_memory_bytes
from funcpipe.profiler.remote.exercise import exercise
from funcpipe.profiler.remote.transfers import bandwidth, seconds

REQUESTS = 10
_FIRST_BYTES = 1 << 20
_MOST_SHARE = 1 / 8  # of the function's memory, for the object that is moved
_MATRIX = 384
_COMPUTE_S = 1.5


def measure_machine(storage: Storage, key: str, *, started_at_s: float, memory_bytes: int) -> MachineReport:
    """Measure memory, storage and processors in turn; `key` is that of a scratch object."""
    exercise()
    base_bytes = peak_memory_bytes()
    try:
        latency_s = measure_latency(storage, key)
        most = int(memory_bytes * _MOST_SHARE)
        data = os.urandom(min(_FIRST_BYTES, most))
        upload_bytes_s, data = bandwidth(lambda body: storage.put(key, body), data, most)
        storage.put(key, data)
        download_bytes_s, _ = bandwidth(lambda body: storage.get(key, stop=len(body)), data, len(data))
    finally:
        storage.delete(key)
    return MachineReport(
        started_at_s=started_at_s,
        latency_s=latency_s,
        upload_bytes_s=upload_bytes_s,
        download_bytes_s=download_bytes_s,
        base_memory_bytes=base_bytes,
        one_thread_s=_products_s(1),
        all_threads_s=_products_s(os.cpu_count() or 1),
    )


def measure_latency(storage: Storage, key: str) -> float:
    """Return the median seconds of a request with a body of one byte."""
    times_s = []
    for _ in range(REQUESTS):
        times_s += [seconds(lambda: storage.put(key, b"1")), seconds(lambda: storage.get(key))]
    return statistics.median(times_s)


def _products_s(threads: int) -> float:
    """Seconds per matrix product that `threads` threads compute together, over a time in which shares even out."""
    until_s = time.perf_counter() + _COMPUTE_S

    def compute() -> int:
        torch.set_num_threads(1)  # which applies to the calling thread only
        matrix, count = torch.rand(_MATRIX, _MATRIX), 0
        while time.perf_counter() < until_s:
            matrix @ matrix
            count += 1
        return count

    with ThreadPoolExecutor(threads) as pool:
        counts = [pool.submit(compute) for _ in range(threads)]
        return _COMPUTE_S / sum(count.result() for count in counts)
