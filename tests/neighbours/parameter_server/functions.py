"""Functions that are threads of the tests' process, around a parameter server."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from funcpipe.client.prepare.job import Job
from funcpipe.core import PlatformSpec, ServerFunctionSpec
from funcpipe.neighbours.parameter_server.function_connection import ServerKeys
from funcpipe.neighbours.parameter_server.function_group import FunctionSite, FunctionWorkerGroup
from funcpipe.neighbours.parameter_server.training import stored_job
from funcpipe.neighbours.parameter_server.worker_group import ServerWorker, WorkerGroup
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.keys import Keys
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from tests.neighbours.parameter_server.conftest import RUN
from tests.support.run_keys import NONCE, RUN_KEY, signed_for_tests

SPEC = replace(load_spec("local"), cold_start_s=0.0)


def no_faults(number: int) -> FunctionFaults:
    return FunctionFaults()


class Jump:
    """The group's clock: it passes a deadline only after `happened` returns true."""

    def __init__(self) -> None:
        self.happened: Callable[[], bool] = lambda: False
        self._ahead_s = 0.0

    def __call__(self) -> float:
        if not self._ahead_s and self.happened():
            self._ahead_s = 1000.0
        return time.monotonic() + self._ahead_s


def wait_for_all(group: WorkerGroup, done: float, *, successors: bool = False) -> None:
    """A watch that lets no step begin while functions, or `successors` of functions, start, however long that takes."""
    assert isinstance(group, FunctionWorkerGroup)
    pool = group._pool
    while not any(connection.given and not connection.over for connection in pool.connections) and (
        group.is_starting or (successors and any(slot.successor is not None for slot in pool.slots.values()))
    ):
        assert group.next() is None


@contextlib.contextmanager
def group_of(
    job: Job,
    *speeds: float,
    push: int = 1,
    faults_of: Callable[[int], FunctionFaults] = no_faults,
    spec: PlatformSpec = SPEC,
    storage: MemoryStorage | None = None,
    generation: int = 0,
    lost: frozenset[int] = frozenset(),
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Iterator[FunctionWorkerGroup]:
    """A group of functions that are threads, with workers of these speeds; nothing that they exchanged is left."""
    kept = storage or MemoryStorage()
    keys = Keys(RUN, generation, NONCE)
    signed = signed_for_tests(kept)
    sent = stored_job(job, signed, ServerKeys(keys).root)
    told = ServerFunctionSpec(
        run=RUN,
        worker="f",
        attempt=0,
        size="1024MB",
        memory_mb=1024,
        storage="memory://",
        bundle_sha256=hashlib.sha256(sent.bundle).hexdigest(),
        seed=sent.seed,
        message_deadline_s=60.0,
        generation=generation,
        nonce=NONCE,
        run_key=RUN_KEY.text,
    )
    platform = ThreadPlatform(spec, kept, faults_of=faults_of, lost=lost)
    site = FunctionSite(job=sent, spec=replace(told, **settings), platform=platform, storage=signed)
    workers = [ServerWorker(name=f"f{i}", speed=speed, push=push) for i, speed in enumerate(speeds)]
    with one_at_a_time(), FunctionWorkerGroup(site, workers, clock=clock) as group:
        yield group
