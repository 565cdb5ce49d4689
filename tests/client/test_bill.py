"""What a run is billed for: all its functions, whoever watched them, for as long as it is known that they ran."""

import time
from dataclasses import replace

import pytest

from funcpipe.client.follow.functions import unwatched_functions
from funcpipe.client.follow.results import bill
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.core import DEFAULT_STORES, Bill, CountsByKind, Outcome
from funcpipe.platforms.base import Handle, State, Status
from funcpipe.platforms.function_group import StartedFunction, WatchedFunction
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import load_worker_specs
from funcpipe.runstate.reader import reported_requests, request_usd, worker_reports
from tests.client.scripted import KEYS, Run, spec_with

WORKERS = tuple(f"s{stage}.r{replica}" for stage in range(3) for replica in range(2))
DONE, FAILED = Status(state=State.DONE), Status(state=State.FAILED, reason="killed by SIGKILL")
USD_S = 1024e-8


def started(run: Run, worker: str, attempt: int, *, at_s: float, token: str = "aa") -> str:
    """Record a function that others have started; returns its name."""
    handle = Handle(worker=worker, name=f"{worker}-{attempt}-{token}")
    document = StartedFunction(worker=worker, attempt=attempt, handle=handle, usd_s=USD_S, started_at_s=at_s)
    put_document(run.storage, KEYS.function(worker, attempt, token), document)
    return handle.name


def attached(run: Run) -> Supervisor:
    supervisor = run.supervisor()
    supervisor.attach(load_worker_specs(run.storage, KEYS))
    return supervisor


def billed(run: Run, watched: list[WatchedFunction]) -> Bill:
    functions = [*watched, *unwatched_functions(run.storage, KEYS, watched)]
    reports = worker_reports(run.storage, KEYS)
    return bill(functions, reports, reported_requests(run.storage, KEYS, reports), spec_with(), earlier_usd=0.0)


def ended(run: Run) -> None:
    """All workers finish after 7 seconds, as their reports say."""
    for worker in WORKERS:
        run.platform.ended[f"{worker}-0"] = DONE
        run.report(worker, Outcome.FINISHED)


def test_whoever_watched_the_bill_is_the_same() -> None:
    run = Run()
    first = run.start()
    late = attached(run)
    ended(run)
    assert first.poll() == late.poll() == 0
    from_start = billed(run, first.functions())
    assert from_start == billed(run, late.functions()) == billed(run, attached(run).functions()) == billed(run, [])
    assert (from_start.functions, from_start.puts, from_start.gets) == (6, 12, 18)
    assert from_start.function_seconds == pytest.approx(6 * 7.0)
    assert from_start.compute_usd == pytest.approx(6 * 7.0 * USD_S)


def test_objects_that_were_not_there_cost_what_the_platform_says() -> None:
    run = Run()
    run.start()
    ended(run)
    reports = worker_reports(run.storage, KEYS)
    requests = reported_requests(
        run.storage, KEYS, reports
    )  # each: two puts, and three gets, one of which found nothing
    puts_usd = 12 * spec_with().price_put_usd + 6 * spec_with().price_invocation_usd
    for price, gets_usd in ((None, 18 * 4e-7), (0.0, 12 * 4e-7), (1e-3, 12 * 4e-7 + 6 * 1e-3)):
        prices = replace(spec_with(), price_get_usd=4e-7, price_empty_get_usd=price)
        assert request_usd(requests, prices, DEFAULT_STORES, functions=6) == pytest.approx(puts_usd + gets_usd)


def test_functions_that_died_unwatched_count_until_their_last_sign_of_life() -> None:
    run = Run()
    started(run, "s0.r0", 0, at_s=1000.0)
    started(run, "s0.r0", 0, at_s=1020.0, token="00")  # the first was never heard of
    started(run, "s0.r0", 1, at_s=1050.0)
    started(run, "s0.r0", 2, at_s=1150.0)
    started(run, "s0.r1", 0, at_s=5000.0)
    started(run, "s1.r0", 0, at_s=0.0)  # as runs of earlier versions recorded it
    started(run, "s1.r0", 1, at_s=3000.0)
    run.beat("s0.r1", alive_s=40.0)
    run.report("s0.r0", Outcome.FINISHED, attempt=2)
    seconds = [function.seconds() for function in unwatched_functions(run.storage, KEYS)]
    assert seconds == [20.0, 30.0, 100.0, 0.0, 40.0, 0.0, 0.0]
    made = billed(run, [])
    assert made.functions == 7
    assert made.function_seconds == pytest.approx(20 + 30 + 100 + 7 + 40)


def test_a_report_goes_before_what_a_client_saw_and_belongs_to_one_function() -> None:
    run = Run()
    run.start()
    again = started(run, "s0.r0", 0, at_s=time.time() + 60)
    ended(run)
    run.platform.ended[again] = DONE
    functions = [function for function in attached(run).functions() if function.started.worker == "s0.r0"]
    functions[0].age_s, functions[1].age_s = 25.0, 99.0
    reports = [report for report in worker_reports(run.storage, KEYS) if report.worker == "s0.r0"]
    made = bill(functions, reports, CountsByKind(), spec_with(), earlier_usd=0.0)
    assert made.function_seconds == pytest.approx(25 + 7)


def test_a_function_that_reported_is_billed_though_its_peer_died_before_it_recorded_it() -> None:
    run = Run()
    supervisor = run.start()
    ended(run)
    supervisor.poll()
    before = billed(run, supervisor.functions())
    run.report("s1.r0", Outcome.FINISHED, attempt=3)
    made = billed(run, supervisor.functions())
    assert made.functions == before.functions + 1
    assert made.function_seconds == pytest.approx(before.function_seconds + 7)
    assert made.compute_usd == pytest.approx(before.compute_usd + 7 * USD_S)
    assert made.request_usd - before.request_usd >= spec_with().price_invocation_usd


def test_a_client_that_attaches_counts_functions_from_their_start() -> None:
    run = Run()
    run.start()
    now_s = time.time()
    names = [started(run, "s0.r0", 1, at_s=now_s - 400), started(run, "s0.r0", 2, at_s=now_s - 100)]
    run.platform.ended |= {"s0.r0-0": FAILED, names[0]: FAILED}
    dead, runs = [function for function in attached(run).functions() if function.started.attempt]
    assert dead.seconds() == pytest.approx(300.0)
    assert 100.0 <= runs.seconds() < 160.0  # nothing was heard of it, but the platform says that it runs
    assert runs.watched_s() < 60.0


def test_functions_that_a_client_never_saw_are_counted_when_it_collects() -> None:
    run = Run()
    supervisor = run.start()
    started(run, "s2.r1", 1, at_s=time.time() + 10)  # which died before the client looked
    ended(run)
    supervisor.poll()
    assert len(supervisor.functions()) == 6
    assert billed(run, supervisor.functions()).functions == 7
