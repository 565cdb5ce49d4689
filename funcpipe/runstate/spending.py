"""What a run has cost and taken, as its heartbeats and reports tell."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from funcpipe.core import PlatformSpec, RunAccount, RunRecord, WorkerReport
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import readable_documents
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import read_heartbeats

_log = logging.getLogger(__name__)


def worker_reports(storage: Storage, keys: Keys) -> tuple[WorkerReport, ...]:
    """The reports of all functions that could make one before they ended."""
    return tuple(readable_documents(storage, WorkerReport, storage.list(keys.worker_reports)))


def spent_so_far(storage: Storage, record: RunRecord) -> RunAccount:
    """What the run has cost and taken: the most that any of its documents tells.

    Requests of the newest generation are not included; those of earlier ones are in its record.
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
    return RunAccount(spent_usd=max(usd), elapsed_s=max(seconds))


def spent_with_requests(storage: Storage, record: RunRecord, prices: PlatformSpec) -> RunAccount:
    """What a run that has ended has cost and taken, with the requests that its functions have reported."""
    keys, spent = Keys.of(record), spent_so_far(storage, record)
    functions = len(list_functions(storage, keys))
    requests_usd = request_usd(worker_reports(storage, keys), prices, functions=functions)
    return replace(spent, spent_usd=spent.spent_usd + requests_usd)


def request_usd(reports: Sequence[WorkerReport], prices: PlatformSpec, *, functions: int) -> float:
    """Dollars for the storage requests in `reports`, and for the invocations of so many functions."""
    puts, gets = sum(report.puts for report in reports), sum(report.gets for report in reports)
    empty_gets = sum(report.empty_gets for report in reports)
    return prices.request_usd(puts, gets, empty_gets) + functions * prices.price_invocation_usd
