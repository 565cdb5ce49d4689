"""Start a prepared run, follow it to its end, collect its result, and clean up behind it."""

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from funcpipe.client.control.commands import after_interrupt
from funcpipe.client.control.stopping import end_generation, end_leftovers, release
from funcpipe.client.follow.base import with_base
from funcpipe.client.follow.finish import billed, collect_finished, collect_kept, finish
from funcpipe.client.follow.interruption import (
    interrupted,
    removed_if_it_fails,
    saved_if_interrupted,
    with_next_commands,
)
from funcpipe.client.follow.provisioned import first_life_of, provisioned
from funcpipe.client.follow.results import OnProgress, RunResult, ignore_progress
from funcpipe.client.follow.standby import OncePerStep, check_not_gone, follow_as_standby
from funcpipe.client.follow.steps import follow
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.comm import codec
from funcpipe.core import RunAccount, RunRecord, WorkerSpec, logs, prices_of
from funcpipe.core.settings import WHY_GONE
from funcpipe.core.stores import DEFAULT, urls_by_kind
from funcpipe.errors import (
    KeyMissing,
    PlanError,
    RunHalted,
    RunTaken,
    RunUnknown,
    Superseded,
)
from funcpipe.partitioner.cost.waits import crowd_time_s
from funcpipe.platforms.base import Storage
from funcpipe.platforms.launch_rate import LaunchRate
from funcpipe.platforms.local.output import keep_client_log
from funcpipe.runstate.base import StoredBase, put_base
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.functions import mark_detached, record_together, unmark_run
from funcpipe.runstate.generations import (
    delete_generation,
    load_worker_specs,
    newest_record,
    refuse_if_gone,
    reserve_generation,
    write_payload,
    write_record,
)
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import BEAT_S, Owner, owned
from funcpipe.runstate.reader import RunReader, spent_so_far
from funcpipe.runstate.reports import ValidationKeys
from funcpipe.runstate.signing import KeyFolder, key_of
from funcpipe.runstate.validations import BestModel

_log = logging.getLogger(__name__)

_STARTS_AT_ONCE = 32
"""Functions that a client starts side by side: each start takes four requests to storage and one to the platform."""


def launch(prepared: PreparedRun, on_progress: OnProgress = ignore_progress) -> RunResult:
    """Train, or watch the run if functions are training it already or have done so, and collect its result.

    Raises WorkerFailed, RunHalted or DeadlineExceeded, naming run, worker and task. A worker that dies is restarted. At
    the end no function runs and no object of the run is left, except what is kept of a failed run to resume it, and the
    model of one that has finished.
    Ctrl-C ends a run that was started here, after a step that is saved where it can be resumed, and lets one that was
    only watched go on: RunInterrupted says which.
    """
    if prepared.running is not None:
        with with_next_commands(prepared, kept=True):
            return billed(prepared, _watch(prepared, prepared.running, on_progress))
    run, kept = prepared.name, prepared.faults.keep
    try:
        with with_next_commands(prepared, kept=kept) as begun, keep_client_log(run), _owned(prepared) as owner:
            fenced, keys = begin(prepared, owner.storage)
            with (
                removed_if_it_fails(owner, run, keep=kept),
                provisioned(fenced) as fenced,
                _supervisor(fenced, keys, owner, keep=kept) as supervisor,
            ):
                record = start(fenced, keys, supervisor)
                begun.set()
                with saved_if_interrupted(fenced, keys, supervisor):
                    result = with_base(prepared, follow(fenced, record, supervisor, on_progress, owner))
            finish(fenced, keys, owner, result)
    except KeyboardInterrupt:
        raise interrupted(prepared, kept=kept) from None
    except SystemExit:
        end = interrupted(prepared, kept=kept)
        _log.warning("\n".join([f"run {run}: the program ends; {end.state}", *after_interrupt(end)]))
        raise
    return billed(prepared, result)


def launch_detached(prepared: PreparedRun) -> str:
    """Start the run and leave it to itself; returns its name. Raises PlanError if it runs already, or has finished."""
    if prepared.has_finished:
        raise PlanError(f"run {prepared.name} has finished; there is nothing to resume, only a result to collect")
    if prepared.running is not None:
        raise PlanError(f"run {prepared.name} still runs; there is nothing to resume")
    with keep_client_log(prepared.name), _owned(prepared) as owner:
        fenced, keys = begin(prepared, owner.storage)
        with provisioned(fenced, detached=True) as fenced, _supervisor(fenced, keys, owner) as supervisor:
            start(fenced, keys, supervisor, detached=True)
            supervisor.detach()
    counts, job = prepared.meter.counts, prepared.job
    _log.info(
        "run %s: to start it, this client made %d puts, %d lists and %d gets: $%.6f, which no later bill has",
        *(prepared.name, counts.puts, counts.lists, counts.gets),
        job.prices.client_usd(prepared.meter.by_kind, job.plan.stores),
    )
    return prepared.name


def _watch(prepared: PreparedRun, record: RunRecord, on_progress: OnProgress) -> RunResult:
    """Follow a run that others have started to its end, and keep or delete what it leaves; or read what was kept.

    One client at a time supervises the functions; others follow the progress, and wait for their turn.
    """
    keys = Keys.of(record)
    unseen = OncePerStep(on_progress)
    try:
        while True:
            try:
                with keep_client_log(keys.run), _owned(prepared, watches=True) as owner:
                    check_not_gone(prepared.storage, record)
                    reader = RunReader(prepared.storage, record)
                    if reader.finished is not None:
                        return with_base(prepared, collect_kept(prepared, reader, reader.finished, unseen))
                    spent = spent_so_far(prepared.storage, record)  # until now, however long others have watched
                    fenced = replace(prepared, storage=owner.storage, account=spent)
                    result = with_base(prepared, _follow_to_end(fenced, record, keys, unseen, owner))
                    release(prepared.platform, record.plan, record.run)
                    finish(fenced, keys, owner, result)
                    return result
            except RunTaken as taken:
                if not taken.watches:
                    raise
                _log.info("run %s: another client supervises it: %s", keys.run, taken.owner)
                follow_as_standby(prepared.storage, record, unseen)
    except KeyboardInterrupt:
        raise interrupted(prepared, running=not prepared.has_finished, kept=True) from None


def _follow_to_end(
    prepared: PreparedRun, record: RunRecord, keys: Keys, on_progress: OnProgress, owner: Owner
) -> RunResult:
    """The result of the run, once the functions have ended that others have started."""
    if prepared.resumed is not None:
        return collect_finished(prepared, RunReader(prepared.storage, record), prepared.resumed, on_progress)
    _log.info("run %s: watches generation %d, which still runs", keys.run, keys.generation)
    with _supervisor(prepared, keys, owner) as supervisor:
        supervisor.attach(load_worker_specs(prepared.storage, keys))
        return follow(prepared, record, supervisor, on_progress, owner)


@contextlib.contextmanager
def _owned(prepared: PreparedRun, *, watches: bool = False) -> Iterator[Owner]:
    """Own the run within this context. Raises RunHalted once another client has taken it over, or the lease is gone;
    RunUnknown if the run is gone as well.
    """
    every_s = min(BEAT_S, prepared.faults.heartbeat_s)
    try:
        with owned(prepared.storage, prepared.name, every_s=every_s, watches=watches) as owner:
            try:
                yield owner
            except (KeyMissing, RunUnknown):
                owner.check_now()  # a client that slept may find that another has ended the run
                raise
    except Superseded as error:
        if error.missing:
            refuse_if_gone(prepared.storage, prepared.name, f"run {prepared.name} was ended here: {error}")
            raise RunHalted(
                f"run {prepared.name} was ended here: {error}; funcpipe run status {prepared.name} shows what is left "
                "of it, and train with --resume goes on from that"
            ) from error
        raise RunHalted(
            f"run {prepared.name} was ended here: another client has taken it over ({error}); "
            f"funcpipe run status {prepared.name} shows what it does"
        ) from error


def begin(prepared: PreparedRun, storage: Storage) -> tuple[PreparedRun, Keys]:
    """The run as its owner writes it into `storage`, and the keys of a new generation.

    What dead clients have left of it is deleted. Raises RunTaken if another client has owned the run since it was
    prepared, RunUnknown if it has vanished since, and PlatformRefused for a storage that does not keep what it must.
    """
    run, before = prepared.name, None if prepared.resumed is None else prepared.resumed.keys
    try:
        newest = Keys.of(newest_record(storage, run))
    except RunUnknown:
        newest = None
    if newest is None and before is not None:
        refuse_if_gone(storage, run, f"run {run} has vanished since this client has looked: {WHY_GONE}")
    if newest != before:
        raise RunTaken(run, "another client, which has begun or ended it since this one checked")
    end_leftovers(storage, run, prepared.reopen, keep=before)
    urls = urls_by_kind(prepared.storage_url)
    apart = [kind for kind in ("messages", "sums") if urls.get(kind, urls[DEFAULT]) != urls[DEFAULT]]
    run_key = None if prepared.shared is None else prepared.shared.run_key
    keys = reserve_generation(storage, run, after=before, apart=apart, run_key=run_key)
    return replace(prepared, storage=storage), keys


def _supervisor(prepared: PreparedRun, keys: Keys, owner: Owner, *, keep: bool = True) -> Supervisor:
    return Supervisor(
        prepared.platform,
        prepared.storage,
        keys,
        prices=prepared.job.prices,
        stores=prepared.job.plan.stores,
        account=prepared.account,
        keep=keep,
        check_owner=owner.check_now,
        meter=prepared.meter,
    )


def start(prepared: PreparedRun, keys: Keys, supervisor: Supervisor, *, detached: bool = False) -> RunRecord:
    """Upload the run and start its functions; return its record. If that fails, the run is what it was before.

    Watchdogs restart the workers of a run that is `detached`, and of no other.
    """
    if prepared.resumed is not None:
        unmark_run(prepared.storage, keys.run)
    try:
        _start_functions(prepared, keys, supervisor)
        record_together(prepared.storage, keys, [function.started for function in supervisor.functions()])
        record = replace(_record(prepared, keys), base=put_base(prepared.storage, keys, _base(prepared, keys)))
        write_record(prepared.storage, keys, record)
        if detached:
            mark_detached(prepared.storage, keys, prepared.platform.wrap_key(key_of(KeyFolder(), keys).text))
    except BaseException:
        _log.warning("run %s: could not be started; what was uploaded is deleted", keys.run)
        supervisor.stop(for_good=True)
        delete_generation(prepared.storage, keys)
        if prepared.resumed is None:
            prepared.storage.delete_many(prepared.storage.list(keys.base))
        raise
    if prepared.resumed is not None:
        end_generation(prepared.storage, prepared.resumed.keys, prepared.reopen)
    return record


def _start_functions(prepared: PreparedRun, keys: Keys, supervisor: Supervisor) -> None:
    """Start functions side by side, no faster than the platform lets; each stage's once it is uploaded."""

    def start_one(spec: WorkerSpec) -> None:
        write_payload(prepared.storage, keys, spec)
        supervisor.start(spec)

    rate, starts = LaunchRate(prepared.platform.spec), list[Future[None]]()
    pool = ThreadPoolExecutor(_STARTS_AT_ONCE, thread_name_prefix="funcpipe-start")
    try:
        for spec in upload(prepared, keys):
            rate.take(1)
            starts.append(pool.submit(start_one, spec))
            if any(start.done() and start.exception() is not None for start in starts):
                break
        for start in wait(starts, return_when=FIRST_EXCEPTION).done:
            start.result()
    except BaseException:
        supervisor.give_up()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _base(prepared: PreparedRun, keys: Keys) -> StoredBase:
    """What no step changes, by where it lies in the run's storage or elsewhere."""
    return prepared.base.below((keys if prepared.shared is None else prepared.shared.keys).base)


def _record(prepared: PreparedRun, keys: Keys) -> RunRecord:
    job, resumed = prepared.job, prepared.resumed
    return RunRecord(
        run=keys.run,
        generation=keys.generation,
        nonce=keys.nonce,
        plan=job.plan,
        platform=prepared.platform.url,
        storage=prepared.storage_url,
        samples=job.samples,
        epochs=job.epochs,
        steps=job.steps,
        first_step=prepared.first_step,
        began_step=prepared.began_step,
        seed=job.seed,
        shuffle=job.shuffle,
        drop_last=job.drop_last,
        clip_grad_norm=job.recipe.clip_grad_norm,
        clip_grad_value=job.recipe.clip_grad_value,
        lr_schedule=job.recipe.lr_schedule,
        average=job.recipe.averaged_by,
        teachers=job.recipe.taught_by,
        loss_over=job.recipe.loss_over,
        precision=job.recipe.precision,
        losses=resumed.losses if resumed is not None else (),
        skipped_steps=resumed.skipped_steps if resumed is not None else (),
        spent_usd=prepared.account.spent_usd,
        elapsed_s=prepared.account.elapsed_s,
        shard_order=None if job.shards is None else job.shards.order,
        validations=prepared.validations,
    )


def upload_code(prepared: PreparedRun, keys: Keys) -> None:
    """Put the data, each stage's code, and what of the model no step changes, unless it lies in storage."""
    for name, contents in prepared.data.objects():
        prepared.storage.put(keys.data(name), contents)
    for file in prepared.base.files:
        prepared.storage.put(keys.base + file.name, file.contents())
    for number, stage in enumerate(prepared.stages):
        prepared.storage.put(keys.bundle(number), stage.bundle)
        _log.info("run %s: stage %d is uploaded, %d bytes of code", keys.run, number, len(stage.bundle))


def upload(prepared: PreparedRun, keys: Keys) -> Iterator[WorkerSpec]:
    """Put data and code unless they are shared, and each stage's tensors and what it had learned.

    Yields workers' payloads by stage.
    """
    job, storage, log_level = prepared.job, prepared.storage, logs.wanted_in_functions()
    run_key, shared = key_of(KeyFolder(), keys).text, prepared.shared
    code = keys if shared is None else shared.keys
    if shared is None:
        upload_code(prepared, keys)
    for number, stage in enumerate(prepared.stages):
        storage.put(keys.parameters(number), codec.encode(stage.tensors))
        first_step = prepared.first_step
        for part, state in prepared.parts_of(number):
            writer = "resumed" if part is None else f"resumed{part.replica}"
            Checkpoints(storage, keys).save(number, first_step, state, writer=writer, part=part)
        for step, state in prepared.best_of(number):
            BestModel(storage, ValidationKeys.of(keys)).save(number, step, state, writer="resumed")
        for replica in range(job.plan.replicas):
            yield WorkerSpec(
                run=keys.run,
                generation=keys.generation,
                nonce=keys.nonce,
                attempt=0,
                stage=number,
                replica=replica,
                plan=replace(job.plan, estimate=None, solver=None),
                storage=prepared.storage_url,
                platform=prepared.platform.url,
                bundle=code.bundle(number),
                bundle_sha256=hashlib.sha256(stage.bundle).hexdigest(),
                parameters=keys.parameters(number),
                epochs=job.epochs,
                seed=job.seed,
                message_deadline_s=job.message_deadline_s,
                first_step=first_step,
                began_step=prepared.began_step,
                first_life=first_life_of(prepared, number, replica),
                faults=prepared.faults,
                limits=prepared.limits,
                account=_account(prepared, number),
                log_level=log_level,
                run_key=run_key,
                validated=prepared.validations[-1] if prepared.validations else None,
                shared="" if shared is None else code.run,
                recipe="" if shared is None else shared.recipe,
                device_memory_mb=prepared.platform.spec.device_memory_mb(job.plan.stages[number].size),
                crowd_s=crowd_time_s(job.plan, job.prices),
            )


def _account(prepared: PreparedRun, stage: int) -> RunAccount:
    """The cost and the time of the run so far, and the prices of a function of `stage` and of requests.

    This client's own requests are in it, and the invocations of all functions.
    """
    prices, plan = prepared.job.prices, prepared.job.plan
    usd_s = prices_of(plan, prices).function_usd_s
    asked_usd = prices.client_usd(prepared.meter.by_kind, plan.stores)
    starting_usd = asked_usd + plan.workers * prices.price_invocation_usd
    return replace(
        prepared.account,
        requests_usd=prepared.account.requests_usd + starting_usd,
        invocation_usd=prices.price_invocation_usd,
        run_usd_s=sum(usd_s) * plan.replicas,
        usd_s=usd_s[stage],
        put_usd=prices.price_put_usd,
        get_usd=prices.price_get_usd,
        empty_get_usd=prices.empty_get_usd,
        hours_usd_s=prices.stores_usd_h(plan.stores) / 3600,
        collect_usd=prices.traffic_usd(prepared.collected_bytes),
        stores=prices.other_stores(plan.stores),
    )
