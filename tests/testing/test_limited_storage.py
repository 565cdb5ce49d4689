"""Storage with S3's rule, and runs under it: the requests of a run are spread over prefixes.

The clock counts requests, so that no test depends on time or on how busy the machine is.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunSettings
from funcpipe.core.backoff import Backoff
from funcpipe.errors import StorageBusy
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.wrappers import Retried
from funcpipe.testing.limited_storage import LimitedStorage
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.platforms.clock import Clock
from tests.support import chaos

WORKERS = chaos.STAGES * chaos.REPLICAS


def test_a_prefix_takes_as_many_requests_as_its_tokens_and_no_other_one_pays_for_it() -> None:
    clock = Clock()
    store = LimitedStorage(MemoryStorage(), puts_s=2, gets_s=4, clock=clock)
    for number in range(2):
        store.put(f"run-1/000/{number}", b"x")
    with pytest.raises(StorageBusy, match="put run-1/000/2: SlowDown, 2 a second below run-1/000 and no more"):
        store.put("run-1/000/2", b"x")
    assert [store.get("run-1/000/1") for _ in range(4)] == [b"x"] * 4
    with pytest.raises(StorageBusy, match="get run-1/000/1: SlowDown, 4 a second"):
        store.get("run-1/000/1")
    store.put("run-1/100/0", b"y")
    clock.now_s += 0.5  # a token for a put, and two for gets
    store.delete("run-1/000/0")
    with pytest.raises(StorageBusy):
        store.delete_many(["run-1/000/1", "run-1/100/0"])
    assert store.get("run-1/000/1") == b"x"
    assert store.list("run-1/100/") == ("run-1/100/0",)
    clock.now_s += 100.0  # no more than a second's tokens are kept
    served = Counter(_is_served(lambda: store.get("run-1/000/1")) for _ in range(10))
    assert served == {True: 4, False: 6}
    assert store.refused == {"run-1/000": 1 + 1 + 1 + 6}
    assert store.served == {"run-1/000": 2 + 4 + 1 + 1 + 4, "run-1/100": 2}


def _is_served(request: Callable[[], object]) -> bool:
    try:
        request()
    except StorageBusy:
        return False
    return True


def test_requests_that_are_tried_again_keep_to_the_limit() -> None:
    """100 gets at 10 a second take 10 s, and some pauses."""
    clock, store = Clock(), MemoryStorage()
    limited = LimitedStorage(store, puts_s=None, gets_s=10, burst_s=0.1, clock=clock)
    patient = Retried(limited, backoff=Backoff(first_s=0.05, most_s=0.4), clock=clock, sleep=clock.sleep)
    began_s = clock.now_s
    patient.put("run-1/000/a", b"x")
    for _ in range(100):
        assert patient.get("run-1/000/a") == b"x"
    assert 9.9 <= clock.now_s - began_s <= 40.0
    assert limited.served == {"run-1/000": 101}


class _Ticking:
    """A clock by which each request takes a millisecond, and those after the first `busy` take a second."""

    def __init__(self, busy: float = math.inf) -> None:
        self._requests = itertools.count()
        self._busy = busy

    def __call__(self) -> float:
        number = next(self._requests)
        return number / 1000 + max(0.0, number - self._busy)


def trained(storage: LimitedStorage) -> RunResult:
    platform = ThreadPlatform(load_spec("local"), storage)
    session = session_on(Site(platform, Retried(storage), "memory://here"), reopen=platform.open)
    try:
        return launch(prepare(chaos.job(), session, settings=RunSettings(name=chaos.RUN)))
    finally:
        platform.stop_all()


def test_no_prefix_of_a_run_takes_more_than_its_share_and_one_that_is_slowed_down_ends_with_the_same_bits() -> None:
    """A prefix takes a quarter of all requests, of either kind: enough for each of six workers. If the whole run were
    below one prefix that takes a fifth of them, many would be refused, until S3 has split it.
    """
    free = LimitedStorage(MemoryStorage(), puts_s=None, gets_s=None)
    spread = LimitedStorage(MemoryStorage(), puts_s=250, gets_s=250, burst_s=0.4, clock=_Ticking())
    crowded = LimitedStorage(
        MemoryStorage(),
        puts_s=200,
        gets_s=200,
        burst_s=0.05,
        prefix_of=lambda key: key.partition("/")[0],
        clock=_Ticking(busy=300),
    )
    results = [trained(storage) for storage in (free, spread, crowded)]
    assert len([prefix for prefix in spread.served if re.fullmatch(f"{chaos.RUN}/[0-9a-f]{{3}}", prefix)]) == WORKERS
    assert not spread.refused
    assert crowded.refused[chaos.RUN] > 0
    for other in results[1:]:
        assert other.losses == results[0].losses
        for name, tensor in results[0].state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
