"""The cost and time of a run, by its heartbeats and reports."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from funcpipe.core import CountsByKind, Heartbeat, PlatformSpec, RunAccount, RunRecord, Stores, WorkerReport
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import readable_documents
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import attempt_of, read_heartbeats

_log = logging.getLogger(__name__)


def worker_reports(storage: Storage, keys: Keys) -> tuple[WorkerReport, ...]:
    """Return the reports of all functions that could make one before they ended."""
    return tuple(readable_documents(storage, WorkerReport, storage.list(keys.worker_reports)))


def spent_so_far(storage: Storage, record: RunRecord) -> RunAccount:
    """Return the cost and time of the run: the most that any of its documents says, reports without hours of stores.

    Requests of the newest generation are apart, by the estimate of its functions; earlier ones are in its record.
    """
    beats = read_heartbeats(storage, record)
    known = [beat for beat in beats if beat is not None]
    usd, seconds = [record.spent_usd], [record.elapsed_s]
    usd += [beat.run_usd for beat in known]
    seconds += [beat.run_s for beat in known]
    if not known:
        reports = worker_reports(storage, Keys.of(record))
        usd.append(record.spent_usd + sum(report.alive_s * report.usd_s for report in reports))
        seconds.append(record.elapsed_s + max((report.alive_s for report in reports), default=0.0))
        _log.warning(
            "run %s: no heartbeat can be read; its account goes on from what %d reports tell: $%.6f, %.1f s",
            *(record.run, len(reports), max(usd), max(seconds)),
        )
    requests_usd = max([beat.run_requests_usd for beat in known], default=0.0)
    return RunAccount(spent_usd=max(usd), elapsed_s=max(seconds), requests_usd=requests_usd)


def spent_with_requests(storage: Storage, record: RunRecord, prices: PlatformSpec) -> RunAccount:
    """Return the cost and time of a run that has ended, with the requests that its functions have reported."""
    keys, spent = Keys.of(record), spent_so_far(storage, record)
    functions = len(list_functions(storage, keys))
    requests = reported_requests(storage, keys, worker_reports(storage, keys))
    requests_usd = request_usd(requests, prices, record.plan.stores, functions=functions)
    return replace(spent, spent_usd=spent.spent_usd + requests_usd, requests_usd=0.0)


def reported_requests(storage: Storage, keys: Keys, reports: Sequence[WorkerReport]) -> CountsByKind:
    """The requests of all attempts: as in `reports`, or by its last heartbeat of one that could make no report."""
    reported = {(report.worker, report.attempt) for report in reports}
    beats = [key for key in storage.list(keys.all_heartbeats) if attempt_of(keys, key) not in reported]
    unreported = (beat.counts for beat in readable_documents(storage, Heartbeat, beats))
    return sum([*(report.counts for report in reports), *unreported], CountsByKind())


def request_usd(requests: CountsByKind, prices: PlatformSpec, stores: Stores, *, functions: int) -> float:
    """Return dollars for storage requests and their bytes, and for the invocations of so many functions."""
    return prices.counted_usd(requests, stores) + functions * prices.price_invocation_usd
