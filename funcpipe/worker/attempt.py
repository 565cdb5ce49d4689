"""One attempt of a worker from its invocation to its exit report; a worker whose function dies gets another attempt."""

import logging
import time
from collections.abc import Callable

import torch

from funcpipe.core import Outcome, WorkerSpec, from_text
from funcpipe.core.logs import in_function
from funcpipe.errors import RunHalted, Superseded, TaskFailed
from funcpipe.platforms import allocator
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.wrappers import Counted
from funcpipe.worker.exit_report import ExitReporter
from funcpipe.worker.setup import load_worker

_log = logging.getLogger(__name__)


def main(payload: str, *, open_storage: Callable[[str], Storage], open_platform: Callable[[str], Platform]) -> None:
    """Run the attempt described by `payload`, the JSON of a WorkerSpec. Ends with exit code 1 after a failure."""
    spec = from_text(WorkerSpec, payload, source="the invocation payload")
    allocator.settle()
    torch.set_num_threads(1)
    with in_function(run=spec.run, worker=spec.worker, attempt=spec.attempt, levels=spec.log_level):
        if not run_attempt(spec, Counted(open_storage(spec.storage)), open_platform):
            raise SystemExit(1)


def run_attempt(
    spec: WorkerSpec,
    storage: Counted,
    open_platform: Callable[[str], Platform],
    *,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Run the attempt of `spec` and report how it ended; whether it ended well.

    An attempt that is superseded reports nothing, as the worker is another function now. `clock` dates the report.
    """
    reporter = ExitReporter(spec, storage, clock)
    outcome, failure = Outcome.FAILED, None
    try:
        outcome = load_worker(spec, storage, open_platform, clock=clock).run()
    except Superseded as error:
        _log.warning("ends without a report, another function is this worker: %s", error)
        return True
    except RunHalted as error:
        _log.warning("ends at once: %s", error)
        outcome = Outcome.HALTED
    except Exception as error:  # noqa: BLE001 - whatever ends a function early is reported to its client
        failure = error
        where = "" if isinstance(error, TaskFailed) else "outside its tasks: "  # a failed task names itself
        _log.error("failed: %s%s", where, error, exc_info=error)
    else:
        _log.info("ends: %s", outcome.value)
    reporter.report(outcome, failure)
    return failure is None
