"""Each function that is a thread has a number of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from funcpipe.client.follow.launch import upload
from funcpipe.core import WorkerSpec
from funcpipe.platforms.base import Handle
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.support.run_keys import NONCE
from tests.support.waiting import LONG_S


class StartsAtOnce(ThreadPlatform):
    """Numbers all of `count` functions before it starts any; then it loses them, as they need not run."""

    def __init__(self, storage: MemoryStorage, count: int) -> None:
        super().__init__(load_spec("local"), storage, lost=frozenset(range(count)))
        self._numbered = threading.Barrier(count, timeout=LONG_S)

    def _start(self, *worker: Any, **options: Any) -> Handle:
        self._numbered.wait()
        return super()._start(*worker, **options)


def first_functions(storage: MemoryStorage, run: str) -> list[WorkerSpec]:
    torch.manual_seed(0)
    job = make_job(small.model(), small.plan(2, 1), small.data, loss=cross_entropy, optimizer=small.optimizer)
    return list(upload(prepared_run(job, storage), Keys(run, 0, NONCE)))


def test_functions_of_runs_that_share_a_key_and_start_at_once_are_told_apart() -> None:
    storage = MemoryStorage()
    specs = [spec for run in ("run-1", "run-2") for spec in first_functions(storage, run)]
    platform = StartsAtOnce(storage, len(specs))
    with ThreadPoolExecutor(len(specs)) as starts:
        names = [handle.name for handle in starts.map(platform.invoke, specs)]
    assert sorted(names) == [f"function {number}" for number in range(4)]
