"""Makes a worker: downloads its code and tensors, and connects its parts."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.core import WorkerSpec
from funcpipe.core.run_key import RunKey
from funcpipe.platforms.base import Invoked, OpenPlatform, Storage
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import FencedStorage, Lease
from funcpipe.runstate.renewal import Renewal
from funcpipe.scheduler.execute import lane_threads
from funcpipe.training.computation import Computation
from funcpipe.training.device import HOST, accelerator
from funcpipe.training.loading import Loader
from funcpipe.training.stage_job import StageJob, load_bundle
from funcpipe.training.warm_up import warm_up
from funcpipe.worker.actions import Actions
from funcpipe.worker.checkpoint_manager import CheckpointInterval, CheckpointManager
from funcpipe.worker.hand_over import Successor
from funcpipe.worker.heartbeat import HaltOrders
from funcpipe.worker.loop import Worker
from funcpipe.worker.peer_recovery import PeerRecovery
from funcpipe.worker.progress import TimeAccount, WorkerProgress
from funcpipe.worker.step_graph import StepGraphs
from funcpipe.worker.step_runner import LaneMonitor, StepReporter, StepRunner
from funcpipe.worker.validation import Validator

_log = logging.getLogger(__name__)


def lease_of(spec: WorkerSpec, storage: Storage) -> Lease:
    """Return the lease of the attempt that `spec` describes, which is not taken yet."""
    keys = Keys.of(spec)
    return Lease(storage, keys, spec.worker, spec.attempt, fresh_s=spec.faults.lease_s)


def load_worker(
    spec: WorkerSpec,
    storage: Storage,
    open_platform: OpenPlatform,
    *,
    lease: Lease | None = None,
    invoked: Invoked | None = None,
    account: TimeAccount | None = None,
    clock: Callable[[], float] = time.time,
) -> Worker:
    """Return the worker of `spec`, ready to run. It takes `lease` then, or one of its own; `clock` dates its events.

    Its function was `invoked` just now, unless that says otherwise; `account` records its use of time.

    Raises CorruptMessage if the code in storage is not what `spec` names.
    """
    invoked, began_s = invoked or Invoked(), time.monotonic()
    stage, job = load_bundle(spec, storage, invoked, base=uploaded(spec).base)
    device = HOST if spec.device_memory_mb is None else accelerator(spec.device_memory_mb)
    job.move(stage, device)
    loaded_s = time.monotonic() - began_s
    _log.info("loaded the code and tensors of stage %d in %.2f s", spec.stage, loaded_s)
    keys = Keys.of(spec)
    lease = lease or lease_of(spec, storage)
    fenced = FencedStorage(storage, lease)
    batches = job.batches(spec)
    progress = WorkerProgress(spec, invoked, steps=spec.epochs * batches.steps_per_epoch)
    budget = progress.budget
    interval = CheckpointInterval(spec.faults, replicas=spec.plan.replicas, longest_step_s=spec.account.step_s)
    interval.checkpoint_s = loaded_s
    loader = job.loader(stage, spec, storage, _data_of(spec), invoked.meter)
    runner = _runner(spec, job, job.computation(stage, spec, device), loader, fenced, clock)
    validator = None
    if job.evaluation is not None:
        validator = Validator(
            *(job.evaluation, fenced, _channel(spec, fenced, keys, runner.cancel), runner),
            trained=stage,
            open_loader=functools.cache(partial(job.evaluation_loader, spec, storage, _data_of(spec), invoked.meter)),
            record=progress.record_messages,
        )
    checkpoints = CheckpointManager(
        spec, fenced, keys, lease=lease, computation=runner.computation, interval=interval, steps=progress.steps
    )
    orders = HaltOrders(storage, keys, lease, notice_steps=lambda: budget.notice_steps(interval.step_s))
    successor = Successor(spec, fenced, keys, open_platform, progress, lifetime_s=_lifetime_s(spec, invoked))
    return Worker(
        spec=spec,
        storage=fenced,
        keys=keys,
        lease=lease,
        orders=orders,
        batches=batches,
        runner=runner,
        checkpoints=checkpoints,
        interval=interval,
        progress=progress,
        account=account or TimeAccount(invoked, clock),
        successor=successor,
        peers=PeerRecovery(spec, fenced, keys, open_platform),
        renewal=Renewal(fenced, spec.run, keys=keys, renewed=progress.record_renewal),
        validator=validator,
        warm_up=partial(warm_up, stage, job.signature, seed=spec.seed, device=device),
    )


def _data_of(spec: WorkerSpec) -> Callable[[str], str]:
    """Return the keys of the objects of the run's data."""
    return uploaded(spec).data


def uploaded(spec: WorkerSpec) -> Keys:
    """Return the keys of what was uploaded when the run began, which trials of a sweep share."""
    return Keys(spec.shared, nonce=spec.nonce) if spec.shared else Keys.of(spec)


def _channel(spec: WorkerSpec, fenced: Storage, keys: Keys, cancel: threading.Event) -> Channel:
    """Return the worker's channel; long waits in it may hold up all functions of the run."""
    empty_get_usd = spec.account.store("messages").empty_get_usd
    estimator = ArrivalEstimator(
        deadline_s=spec.message_deadline_s, empty_get_usd=empty_get_usd, idle_usd_s=spec.account.run_usd_s
    )
    return Channel(
        fenced, estimator, run_key=RunKey(spec.run_key), cancel=cancel, started=partial(_news, spec, fenced, keys)
    )


def _news(spec: WorkerSpec, storage: Storage, keys: Keys) -> tuple[str, ...]:
    """Return the names of the functions that the run has started, which make others wait.

    A replica that trains alone may be many steps behind those that wait to meet it: so the steps that are reported
    count too.
    """
    reported = storage.list(keys.step_reports) if spec.plan.trains_locally else ()
    return *storage.list(keys.functions), *reported


def _lifetime_s(spec: WorkerSpec, invoked: Invoked) -> float | None:
    """Return the age that the function may reach: as planned, or as its platform says, if that is less."""
    known = [s for s in (spec.faults.lifetime_s, invoked.lifetime_s) if s is not None]
    share = spec.first_life if spec.attempt == 0 else 1.0
    return share * min(known) if known else None


def _runner(
    spec: WorkerSpec,
    job: StageJob,
    computation: Computation,
    loader: Loader | None,
    fenced: Storage,
    clock: Callable[[], float],
) -> StepRunner:
    keys, cancel, meetings = Keys.of(spec), threading.Event(), job.meetings(spec)
    channel = _channel(spec, fenced, keys, cancel)
    return StepRunner(
        spec=spec,
        graphs=StepGraphs(
            *(spec, keys, job.routes, job.batches(spec)),
            norms=computation.norm.is_needed,
            loads=loader is not None,
            meetings=meetings,
        ),
        computation=computation,
        actions=Actions(computation, channel, keys, job.routes, spec.plan, spec.stage, spec.replica, loader, meetings),
        lanes=LaneMonitor(),
        threads=lane_threads(),
        reporter=StepReporter(spec, fenced, keys),
        loader=loader,
        cancel=cancel,
        clock=clock,
    )
