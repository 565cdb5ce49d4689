"""Many clients that ask at once for what a storage gives to so many a second, by one clock for all of them."""

import heapq
import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Invocation, PlatformSpec, RunSettings, Streams, Sync, SyncWay, WorkerSpec, to_text
from funcpipe.core.backoff import Backoff
from funcpipe.errors import StorageBusy
from funcpipe.partitioner.cost.stores import sync_requests
from funcpipe.partitioner.cost.waits import crowd_time_s
from funcpipe.platforms.base import Handle, Invoked, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.limited_storage import LimitedStorage
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.worker import attempt
from tests.analysis.test_predict import summing
from tests.support import chaos


def served_s(clients: int, gets_s: float, crowd_s: float | None, seed: int) -> tuple[float, float]:
    """Return the seconds until all clients have been served once, and the tries of each."""
    now_s, draw, tries = 0.0, random.Random(seed), 0
    backoff = Backoff(first_s=0.1, most_s=5.0, crowd_s=crowd_s, draw=draw.random)
    storage = LimitedStorage(MemoryStorage(), puts_s=None, gets_s=gets_s, burst_s=0.1, clock=lambda: now_s)
    storage.put("a/b/c", b"")
    coming = [(0.0, client, 1) for client in range(clients)]
    while coming:
        now_s, client, tried = heapq.heappop(coming)
        tries += 1
        try:
            storage.get("a/b/c")
        except StorageBusy:
            heapq.heappush(coming, (now_s + backoff.pause_s(tried, now_s), client, tried + 1))
    return now_s, tries / clients


@pytest.mark.parametrize(("clients", "gets_s"), [(127, 20.0), (127, 200.0), (2000, 5500.0)])
def test_a_crowd_whose_size_is_known_is_served_in_hardly_more_than_the_time_that_it_takes(
    clients: int, gets_s: float
) -> None:
    """Without that it takes half as long again, and more: most come late, while the storage is idle."""
    least_s = clients / gets_s
    known, unknown = ([served_s(clients, gets_s, crowd_s, seed) for seed in range(4)] for crowd_s in (least_s, None))
    assert mean(seconds for seconds, _ in known) <= 1.1 * least_s
    assert mean(seconds for seconds, _ in unknown) >= 1.4 * least_s
    assert mean(tries for _, tries in known) <= 1.5 * mean(tries for _, tries in unknown)


def test_a_crowd_that_is_smaller_than_expected_does_not_wait_longer() -> None:
    known, unknown = ([served_s(8, 20.0, crowd_s, seed)[0] for seed in range(100)] for crowd_s in (6.4, None))
    assert mean(known) <= 1.1 * mean(unknown)


def test_pauses_grow_up_to_half_of_the_time_that_is_left_and_then_again() -> None:
    backoff = Backoff(first_s=0.1, most_s=5.0, crowd_s=8.0, draw=lambda: 1.0)
    pauses_s = [
        backoff.pause_s(*at) for at in ((1, 0.1), (4, 0.8), (7, 2.0), (9, 6.0), (12, 7.9), (13, 9.0), (20, 40.0))
    ]
    assert pauses_s == pytest.approx([0.1, 0.8, 3.0, 1.0, 0.1, 0.5, 5.0])


@pytest.mark.parametrize(
    ("way", "replicas", "seconds"),
    [
        (SyncWay(Sync.TREE, Streams(1, 11, 1)), 128, 128 / 5500),
        (SyncWay(Sync.EXCHANGE, Streams(1, 1, 1)), 8, 8 / 5500),
        (SyncWay(Sync.STREAMED, Streams(1, 1, 1)), 128, 128 * 254 / 16 / 5500),
        (SyncWay(Sync.TREE, Streams(1, 1, 1)), 1, None),
    ],
    ids=str,
)
def test_the_time_of_a_crowd_is_that_of_the_requests_below_one_prefix(
    way: SyncWay, replicas: int, seconds: float | None
) -> None:
    plan, _ = summing(1000, replicas, way)
    assert crowd_time_s(plan, load_spec("aws-lambda")) == (None if seconds is None else pytest.approx(seconds))
    assert crowd_time_s(plan, load_spec("local")) is None


def test_an_account_takes_the_requests_of_all_stages() -> None:
    way = SyncWay(Sync.STREAMED, Streams(1, 1, 1))
    plan, _ = summing(1000, 16, way)
    spec = load_spec("aliyun-fc")
    assert spec.requests_s == 10_000
    assert crowd_time_s(plan, spec) == pytest.approx(sum(sync_requests(way, 16)) / 10_000)


class _Noted(ThreadPlatform):
    """Notes what each function is told."""

    def __init__(self, spec: PlatformSpec, storage: Storage) -> None:
        super().__init__(spec, storage)
        self.specs: list[WorkerSpec] = []

    def invoke(self, worker: Invocation) -> Handle:
        assert isinstance(worker, WorkerSpec)
        self.specs.append(worker)
        return super().invoke(worker)


def test_each_function_knows_the_time_of_a_crowd_and_tries_again_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, opened = MemoryStorage(), []
    platform = _Noted(load_spec("local"), storage)
    job = replace(chaos.job(), prices=replace(load_spec("local"), gets_s=40.0))
    session = session_on(Site(platform, storage, "memory://here"), reopen=platform.open)
    try:
        launch(prepare(job, session, settings=RunSettings(name=chaos.RUN)))
    finally:
        platform.stop_all()
    assert {spec.crowd_s for spec in platform.specs} == {2 / 40}

    def open_storage(url: str, *, crowd_s: float | None = None, **_: Any) -> Storage:
        opened.append(crowd_s)
        return storage

    monkeypatch.setattr(attempt, "run_attempt", lambda *_, **__: True)
    payload = to_text(platform.specs[0])
    attempt.main(payload, open_storage=open_storage, open_platform=platform.open, invoked=Invoked())
    assert opened == [2 / 40]
