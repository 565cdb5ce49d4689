"""Functions as processes of their own on this machine's GPU, or on the tests' stand-in for one, and what these hold.

The memory of the host is what the system counts as resident in the process, RSS. The stand-in's device is memory of the
host, too: there, what tensors hold on the device is subtracted, as `torch.standin.memory_allocated` counts it, and the
allocator gives every larger block back at once, so that RSS has no memory that was the device's before.
"""

import ctypes
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.job import Job
from funcpipe.core import FaultTolerance, WorkerSpec, from_text, to_text
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import OPEN, Gate, Invoked, Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.wrappers import StorageWrapper
from funcpipe.profiler.remote.exercise import exercise
from funcpipe.runstate.keys import Keys
from funcpipe.training.device import compute_deterministically
from funcpipe.worker.attempt import run_attempt
from funcpipe.worker.deferred_compiler import defer_compiler
from tests.in_process import prepared_run
from tests.recording import Recording
from tests.support import stand_in
from tests.support.run_keys import NONCE
from tests.support.stand_in_device import NAME

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.001
_LATE_S = 120.0  # for a checkpoint after which no step comes
_M_MMAP_THRESHOLD, _OWN_BLOCK_BYTES = -3, 64 * 1024  # glibc, malloc.h


@dataclass(frozen=True)
class HostUse:
    """Bytes of the host that a function holds: before it begins, and at its peak; of the former, what came with the
    first use of the device.
    """

    base_bytes: int
    peak_bytes: int
    driver_bytes: int


def install(device: str) -> None:
    """Have this process compute on the device of that name, as functions do."""
    torch.set_num_threads(1)
    defer_compiler()
    compute_deterministically()
    if device != NAME:
        allocator.configure()
        return
    stand_in.install()
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)


def host_bytes() -> int:
    """Return what this process holds of the host's memory."""
    while True:
        before = _device_bytes()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
        if before == _device_bytes():
            return resident - before


def _device_bytes() -> int:
    """Return the part of the host's memory that stands in for a device's."""
    standin: Any = getattr(torch, NAME, None)
    return 0 if standin is None else standin.memory_allocated()


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """Meanwhile the last number of what is yielded is the most that the process has held of the host."""
    most, over = [host_bytes()], threading.Event()

    def sample() -> None:
        while not over.wait(_SAMPLE_S):
            most[0] = max(most[0], host_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


class LateFile(StorageWrapper):
    """Holds the first file of a checkpoint back until sums of the next step go out, as a slow store might: all that a
    function may hold at once it does.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._is_held, self._sums_go_out = False, threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if self._is_held and "put-merged" in key:
            self._sums_go_out.set()
        if key.endswith(".safetensors") and not self._is_held:
            self._is_held = True
            self._sums_go_out.wait(_LATE_S)
        super().put(key, data, if_absent=if_absent, gate=gate)


def run_function(text: str, device: str) -> HostUse:
    """Run the attempt of a worker in this process, after what it needs of torch, and of the device, is loaded."""
    spec = from_text(WorkerSpec, text, source="the study")
    exercise()
    without = host_bytes()
    small = nn.Linear(8, 8).to(device)
    torch.autograd.backward(small(torch.ones(4, 8, device=device)).sum())
    del small
    with _sampled() as most:
        base = most[0]
        assert run_attempt(spec, LateFile(open_storage(spec.storage)), Recording().open, invoked=Invoked())
    return HostUse(base_bytes=base, peak_bytes=most[0], driver_bytes=base - without)


@dataclass(frozen=True)
class Apart:
    """A run whose functions were processes: what these held of the host, in the order of the plan, and its storage."""

    uses: Sequence[HostUse]
    storage: Storage


def run_apart(job: Job, folder: str, device: str, *, faults: FaultTolerance) -> Apart:
    """Train with each function in a process of its own, and the storage in `folder`."""
    url = Path(folder).as_uri()
    storage = open_storage(url)
    prepared = prepared_run(job, storage, storage_url=url, faults=faults, accelerated=True)
    specs = [*upload(prepared, Keys("run-1", 0, NONCE))]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        len(specs), mp_context=context, initializer=install, initargs=(device,), max_tasks_per_child=1
    ) as processes:
        started = [processes.submit(run_function, to_text(spec), device) for spec in specs]
        return Apart([future.result() for future in started], storage)
