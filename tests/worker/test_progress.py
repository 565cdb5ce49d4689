"""How old a function is, when it must leave, and what it takes the run to cost."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.core import (
    CountsByKind,
    FaultTolerance,
    Halt,
    RequestCounts,
    RunAccount,
    RunLimits,
    StoreSpec,
    WorkerSpec,
)
from funcpipe.core.settings import leaves_at_s, overlap_s
from funcpipe.platforms.base import Invoked
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.halt import BudgetGuard
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.hand_over import HandOverCosts
from funcpipe.worker.loop import Worker
from funcpipe.worker.progress import WorkerProgress
from funcpipe.worker.setup import load_worker
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests

KEYS = Keys("run-1", 0, NONCE)
PUT_USD, GET_USD, EMPTY_USD = 5e-6, 4e-7, 1e-7
ACCOUNT = RunAccount(spent_usd=1.0, requests_usd=0.5, put_usd=PUT_USD, get_usd=GET_USD, empty_get_usd=EMPTY_USD)


def uploaded(storage: MemoryStorage, *, stages: int = 1, replicas: int = 1) -> list[WorkerSpec]:
    torch.manual_seed(0)
    job = make_job(
        small.model(),
        small.plan(stages=stages, replicas=replicas),
        small.data,
        loss=F.cross_entropy,
        optimizer=small.optimizer,
    )
    faults = FaultTolerance(lifetime_s=900.0, cold_start_s=10.0)
    return list(upload(prepared_run(job, storage, platform_url=Recording().url, faults=faults), KEYS))


def loaded(invoked: Invoked, platform: Recording, account: RunAccount | None = None) -> Worker:
    storage = MemoryStorage()
    (spec,) = uploaded(storage)
    spec = spec if account is None else replace(spec, account=account)
    own = signed_for_tests(storage)
    put_document(own, KEYS.payload(spec.worker), spec)
    return load_worker(spec, own, platform.open, invoked=invoked)


@pytest.mark.parametrize(
    ("age_s", "lifetime_s", "leaves"),
    [(0.0, None, False), (880.0, None, True), (0.0, 900.0, False), (100.0, 120.0, True), (100.0, 2000.0, False)],
)
def test_a_function_leaves_before_its_platform_ends_it_counted_from_its_invocation(
    age_s: float, lifetime_s: float | None, leaves: bool
) -> None:
    platform = Recording()
    worker = loaded(Invoked(at_s=time.monotonic() - age_s, lifetime_s=lifetime_s), platform)
    assert age_s <= worker.progress.age_s < age_s + 300
    worker.lease.take()
    worker.successor.start_in_time(last=100, step_s=1.0, saving_s=1.0)
    assert (len(platform.invoked) == 1) is leaves
    if leaves:
        (spec,) = platform.invoked
        assert isinstance(spec, WorkerSpec)
        assert spec.faults.lifetime_s == 900.0  # the next function has a life of its own


def test_no_successor_is_started_where_the_run_is_to_end_before() -> None:
    platform = Recording()
    worker = loaded(Invoked(at_s=time.monotonic() - 870.0), platform)
    worker.lease.take()
    worker.successor.start_in_time(last=worker.progress.done + 3, step_s=1.0, saving_s=1.0)
    assert platform.invoked == []
    worker.successor.start_in_time(last=worker.progress.done + 300, step_s=1.0, saving_s=1.0)
    assert len(platform.invoked) == 1


def test_a_function_has_as_long_for_its_first_step_as_for_those_of_the_one_before() -> None:
    """At a limit of the run it may end the step that it is in, which lasts twice as long as any before at most."""
    platform = Recording()
    worker = loaded(Invoked(at_s=time.monotonic() - 880.0), platform)
    worker.progress.longest_step_s = 7.0
    worker.lease.take()
    worker.successor.start_in_time(last=100, step_s=1.0, saving_s=1.0)
    (spec,) = platform.invoked
    assert isinstance(spec, WorkerSpec)
    successor = loaded(Invoked(), platform, spec.account)
    successor.progress.budget = BudgetGuard(RunLimits(deadline_s=1.0), spec.account, heartbeat_s=1.0)
    assert successor.limits.grace_s() == 2 * 7.0 + successor.spec.faults.heartbeat_s / 4
    assert successor.progress.account.step_s == 7.0  # and so have those that it starts before its first step


def test_what_a_hand_over_will_cost_is_counted_before_it_begins() -> None:
    """Functions live for 900 s, and start within 10 s."""
    worker = loaded(Invoked(at_s=time.monotonic() - 700.0), Recording())
    leaves_s = leaves_at_s(900.0, 1.0, 2.0) - 700.0
    assert worker.successor.costs_within(leaves_s - 50.0, step_s=1.0, saving_s=2.0) == HandOverCosts(0.0, 0.0)
    found = worker.successor.costs_within(leaves_s + 1.0, step_s=1.0, saving_s=2.0)
    assert found == HandOverCosts(pause_s=2 * 2.0 * worker.progress.workers, beside_s=overlap_s(10.0, 1.0))
    account = RunAccount(spent_usd=5.0, run_usd_s=0.1)
    guard = BudgetGuard(RunLimits(max_usd=10.0), account, heartbeat_s=1.0)
    order = partial(guard.halt_before_exceeding, step=0, steps=100, age_s=10.0, step_s=1.0, end_s=5.0)
    assert order() is None
    assert order(beside_s=40.0) == Halt(reason="it would cost more than $10", step=3)


def progress_of(own: RequestCounts, *, workers: int) -> WorkerProgress:
    spec = uploaded(MemoryStorage(), stages=2, replicas=workers // 2)[0]
    invoked = Invoked()
    invoked.meter.add(own)
    return WorkerProgress(replace(spec, account=ACCOUNT), invoked, steps=10)


def test_a_function_estimates_what_the_requests_of_all_cost() -> None:
    progress = progress_of(RequestCounts(puts=30, lists=5, gets=90, empty_gets=40), workers=4)
    own, others = RequestCounts(puts=20, gets=40), RequestCounts(puts=100, gets=300)
    progress.record_messages(CountsByKind(default=own), CountsByKind(default=others))
    own_usd = 35 * PUT_USD + 50 * GET_USD + 40 * EMPTY_USD
    others_usd = (100 + 3 * 15) * PUT_USD + (300 + 3 * 10) * GET_USD + 3 * 40 * EMPTY_USD
    assert progress.run_requests_usd == pytest.approx(0.5 + own_usd + others_usd)
    assert progress.account.requests_usd == progress.run_requests_usd
    assert progress.account.spent_usd == pytest.approx(1.0)  # functions are free here


def test_each_kind_of_message_counts_at_the_price_of_its_store() -> None:
    near = StoreSpec(name="near", what="near", latency_s=0.0, price_put_usd=2e-6, price_get_usd=1e-7)
    near = replace(near, price_sent_usd_gb=8.0)
    spec = uploaded(MemoryStorage(), stages=2, replicas=1)[0]
    invoked = Invoked()
    invoked.meter.add(RequestCounts(puts=30, gets=90, empty_gets=40))
    invoked.meter.add(RequestCounts(puts=12, gets=20, empty_gets=10, sent_bytes=1 << 20), "messages")
    progress = WorkerProgress(replace(spec, account=replace(ACCOUNT, stores={"messages": near})), invoked, steps=10)
    own, others = RequestCounts(puts=12, gets=10), RequestCounts(puts=7, gets=9)
    progress.record_messages(CountsByKind(messages=own), CountsByKind(messages=others))
    beside_usd = 30 * PUT_USD + 50 * GET_USD + 40 * EMPTY_USD + 10 * 1e-7 + 8.0 / 1024
    assert progress.run_requests_usd == pytest.approx(0.5 + 2 * beside_usd + (12 + 7) * 2e-6 + (10 + 9) * 1e-7)


def test_hours_of_stores_count_once_however_many_functions_run() -> None:
    account = RunAccount(spent_usd=1.0, run_usd_s=0.5, hours_usd_s=0.25)
    guard = BudgetGuard(RunLimits(max_usd=20.0), account, 10.0)
    guard.begin_overlap(10.0)
    assert guard.spent_usd(16.0) == pytest.approx(1.0 + (16 + 6) * 0.5 + 16 * 0.25)
    assert guard.exceeded(16.0) is None
    assert guard.exceeded(20.0) == "it would cost more than $20"


def test_a_client_s_download_counts_towards_the_limit_before_it_is_made() -> None:
    account = RunAccount(spent_usd=0.1, run_usd_s=0.01, requests_usd=0.1, collect_usd=0.3)
    guard = BudgetGuard(RunLimits(max_usd=1.0), account, heartbeat_s=5.0)
    assert guard.exceeded(49.0) is None
    assert guard.exceeded(51.0) == "it would cost more than $1"
    assert guard.spent_usd(51.0) + guard.requests_usd() == pytest.approx(0.71)  # it is not spent yet


def test_requests_count_towards_the_limit_as_fast_as_they_are_made() -> None:
    account = RunAccount(spent_usd=0.1, run_usd_s=0.01, requests_usd=0.1)
    asked = BudgetGuard(RunLimits(max_usd=1.0), account, heartbeat_s=5.0, requests_usd=lambda: 0.3)
    assert asked.exceeded(49.0) is None
    assert asked.exceeded(51.0) == "it would cost more than $1"
    assert asked.exceeded(20.0, ahead_s=10.0) is None  # 0.2 + 0.3 + 0.3 + 0.15
    assert asked.exceeded(20.0, ahead_s=13.0) == "it would cost more than $1"
    assert asked.halt_before_exceeding(step=1, steps=100, age_s=20.0, step_s=1.0, end_s=1.0) is None
    assert asked.halt_before_exceeding(step=1, steps=100, age_s=20.0, step_s=1.0, end_s=3.0) is not None


def test_two_functions_of_a_worker_that_hand_over_are_both_counted() -> None:
    """Predecessor and successor run side by side, and both are billed."""
    account = replace(ACCOUNT, requests_usd=0.0, run_usd_s=0.5)
    before = BudgetGuard(RunLimits(max_usd=100.0), account, 10.0)
    assert before.spent_usd(20.0) == pytest.approx(1.0 + 20 * 0.5)
    before.begin_overlap(20.0)
    assert before.spent_usd(30.0) == pytest.approx(1.0 + (20 + 2 * 10) * 0.5)
    after = BudgetGuard(RunLimits(max_usd=100.0), replace(account, spent_usd=before.spent_usd(20.0)), 10.0)
    after.end_overlap(10.0)
    assert after.spent_usd(10.0) == before.spent_usd(30.0)
    assert after.spent_usd(40.0) == pytest.approx(before.spent_usd(30.0) + 30 * 0.5)


def test_a_successor_is_told_of_its_invocation_s_price() -> None:
    storage = MemoryStorage()
    first, *_ = uploaded(storage, stages=2, replicas=2)
    spec = replace(first, account=replace(ACCOUNT, invocation_usd=0.01))
    progress = WorkerProgress(spec, Invoked(), steps=10)
    told = progress.successor_account
    assert told.requests_usd == pytest.approx(progress.run_requests_usd + 4 * 0.01)
    assert progress.run_requests_usd >= ACCOUNT.requests_usd
