"""One attempt of a worker from its invocation to its exit report; a worker whose function dies gets another attempt."""

import logging
import time
from collections.abc import Callable

import torch

from funcpipe.core import Outcome, WorkerSpec, from_text
from funcpipe.core.logs import in_function
from funcpipe.core.run_key import RunKey
from funcpipe.errors import RunHalted, Superseded, TaskFailed, WorkerFailed
from funcpipe.platforms import allocator
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage, Storage
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.signed_storage import OneKey, SignedStorage
from funcpipe.worker.exit_report import ExitReporter
from funcpipe.worker.setup import lease_of, load_worker
from funcpipe.worker.time_account import TimeAccount

_log = logging.getLogger(__name__)


def main(payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked) -> None:
    """Run the attempt described by `payload`, the JSON of a WorkerSpec. Ends with exit code 1 after a failure."""
    spec = from_text(WorkerSpec, payload, source="the invocation payload")
    allocator.configure()
    torch.set_num_threads(1)
    with in_function(run=spec.run, worker=spec.worker, attempt=spec.attempt, levels=spec.log_level):
        storage = open_storage(spec.storage, retry_s=spec.message_deadline_s, meter=invoked.meter)
        ended_well = run_attempt(spec, storage, open_platform, invoked=invoked)
    if not ended_well:
        raise SystemExit(1)


def run_attempt(
    spec: WorkerSpec,
    storage: Storage,
    open_platform: OpenPlatform,
    *,
    invoked: Invoked,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Run the attempt of `spec` and report how it ended; whether it ended well.

    The requests of `storage` are counted by the meter of `invoked`. An attempt that is superseded reports nothing, as
    the worker is another function now. `clock` dates the report.
    """
    signed = SignedStorage(storage, OneKey(RunKey(spec.run_key)))
    lease = lease_of(spec, signed)
    account = TimeAccount(invoked, clock)
    reporter = ExitReporter(spec, signed, lease, invoked, clock, account)
    try:
        outcome, failure = _run(spec, signed, open_platform, lease, invoked, account, clock)
        if outcome is not Outcome.HANDED_OVER and not lease.taken and spec.follows_within_s is not None:
            _log.warning("ends without a report, the attempt before is still this worker")
            return failure is None
        reporter.report(outcome, failure)
    except Superseded as error:
        _log.warning("ends without a report: %s", error)
        return True
    return failure is None


def _run(
    spec: WorkerSpec,
    storage: SignedStorage,
    open_platform: OpenPlatform,
    lease: Lease,
    invoked: Invoked,
    account: TimeAccount,
    clock: Callable[[], float],
) -> tuple[Outcome, BaseException | None]:
    """Run the attempt: how it ended, and the error if it failed. Raises Superseded."""
    try:
        _check_attempts(spec)
        worker = load_worker(spec, storage, open_platform, lease=lease, invoked=invoked, account=account, clock=clock)
        outcome = worker.run()
    except Superseded:
        raise
    except RunHalted as error:
        _log.warning("ends at once: %s", error)
        return Outcome.HALTED, None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever ends a function early is reported to its client
        where = "" if isinstance(error, TaskFailed) else "outside its tasks: "  # a failed task names itself
        _log.error("failed: %s%s", where, error, exc_info=error)
        return Outcome.FAILED, error
    _log.info("ends: %s", outcome.value)
    return outcome, None


def _check_attempts(spec: WorkerSpec) -> None:
    """Clouds would let functions that start functions go on for ever; here that ends. Raises WorkerFailed."""
    most = spec.faults.max_attempts
    if spec.attempt >= most:
        raise WorkerFailed(
            f"worker {spec.worker} has had {most} functions, as many as FaultTolerance.max_attempts allows; "
            "resume the run to go on with as many again"
        )
