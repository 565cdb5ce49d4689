"""A probe: a function that measures the platform it runs on, or times the layers of a model there."""

import hashlib
import os
import statistics
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from funcpipe.comm import codec
from funcpipe.core import MB, LayerReport, MachineReport, ProbeSpec, from_text, to_text
from funcpipe.core.logs import in_function
from funcpipe.core.texts import shortened, without_surrogates
from funcpipe.errors import CorruptMessage
from funcpipe.model.split import load_stage
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage, Storage
from funcpipe.platforms.process import peak_memory_bytes
from funcpipe.profiler.measure import measure_here
from funcpipe.profiler.remote.exercise import exercise
from funcpipe.profiler.remote.storage_speed import bandwidth, seconds

REQUESTS = 10
_FIRST_BYTES = 1 << 20
_MOST_SHARE = 1 / 8  # of the function's memory, for the object that is moved
_MATRIX = 384
_COMPUTE_S = 1.5


@dataclass(frozen=True, slots=True)
class ProbeKeys:
    """The storage keys of the objects of a measurement."""

    run: str

    def bundle(self, layer: int) -> str:
        """The code of a layer."""
        return f"{self.run}/layers/{layer}.bundle"

    def tensors(self, layer: int) -> str:
        """The parameters and the inputs of a layer."""
        return f"{self.run}/layers/{layer}.tensors"

    def machine(self, probe: int) -> str:
        """The MachineReport of a function."""
        return f"{self.run}/probes/{probe}/machine"

    def layer(self, size: str, layer: int) -> str:
        """The LayerReport of a function of some size."""
        return f"{self.run}/times/{size}/{layer}"

    def failure(self, probe: int) -> str:
        """The traceback of a function that failed."""
        return f"{self.run}/probes/{probe}/failure"

    def scratch(self, probe: int) -> str:
        """An object that a function writes and reads to time the storage."""
        return f"{self.run}/probes/{probe}/trial"


def main(payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked) -> None:
    """Measure what `payload`, the JSON of a ProbeSpec, asks for. Ends with exit code 1 after a failure."""
    started_at_s = time.time()
    spec = from_text(ProbeSpec, payload, source="the invocation payload")
    allocator.configure()
    torch.set_num_threads(1)
    with in_function(run=spec.run, worker=spec.worker, attempt=0):
        _measure(spec, open_storage(spec.storage), started_at_s)


def _measure(spec: ProbeSpec, storage: Storage, started_at_s: float) -> None:
    try:
        if spec.layers:
            _measure_layers(spec, storage, until_s=started_at_s + spec.time_s)
        else:
            _measure_platform(spec, storage, started_at_s)
    except Exception as error:  # noqa: BLE001 - any failure is reported to the client
        text = shortened(without_surrogates("".join(traceback.format_exception(error))))
        storage.put(ProbeKeys(spec.run).failure(spec.number), text.encode())
        raise SystemExit(1) from None


def _measure_platform(spec: ProbeSpec, storage: Storage, started_at_s: float) -> None:
    report = measure_machine(
        storage,
        ProbeKeys(spec.run).scratch(spec.number),
        started_at_s=started_at_s,
        memory_bytes=spec.memory_mb * MB,
    )
    storage.put(ProbeKeys(spec.run).machine(spec.number), to_text(report).encode())


def _measure_layers(spec: ProbeSpec, storage: Storage, *, until_s: float) -> None:
    """Time the layers one by one, and report each at once, so that a layer too large for this function loses no
    results.
    """
    for number in spec.layers:
        if time.time() > until_s:
            return
        report = _measure_layer(spec, storage, number)
        storage.put(ProbeKeys(spec.run).layer(spec.size, number), to_text(report).encode())


def _measure_layer(spec: ProbeSpec, storage: Storage, number: int) -> LayerReport:
    bundle = storage.get(ProbeKeys(spec.run).bundle(number))
    if hashlib.sha256(bundle).hexdigest() != spec.code[str(number)]:
        raise CorruptMessage(
            f"the code of layer {number} is not the one that the invocation names: its SHA-256 differs"
        )
    stage, (values, loss) = load_stage(bundle, codec.decode(storage.get(ProbeKeys(spec.run).tensors(number))))
    return measure_here(stage, values, loss, spec.repeats)


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
