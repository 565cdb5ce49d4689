"""Start the functions of a run on a platform, look after them, collect what they leave, clean up behind them."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from funcpipe.client.job import Care, Job
from funcpipe.client.results import Progress, RunResult, collect
from funcpipe.client.supervisor import POLL_S, Supervisor
from funcpipe.client.upload import upload
from funcpipe.core import Life, PlatformSpec, RunRecord, StepReport
from funcpipe.errors import DeadlineExceeded, KeyMissing
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.local.log_files import kept_by_client
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.generations import delete_all, delete_generation, record_run, reserve
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import Resumed

NO_CARE = Care()


def run_name() -> str:
    """A name that no other run has."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def launch(
    job: Job,
    *,
    platform: Platform,
    storage: Storage,
    storage_url: str,
    care: Care = NO_CARE,
    run: str | None = None,
    resumed: Resumed | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> RunResult:
    """Train `job` on functions of `platform` that share `storage`, which they open by `storage_url`.

    Raises PlanError before any function starts; WorkerFailed, RunHalted or DeadlineExceeded, naming run, worker and
    task, after that. A worker that dies is started again. At the end no function runs and no object of the run is left,
    unless `care` says otherwise.
    """
    keys = reserve(storage, run or run_name())
    with (
        kept_by_client(keys.run),
        _objects_removed(storage, keys, keep=care.keep),
        Supervisor(platform, storage, keys, prices=job.prices, on_oom=care.on_oom) as fleet,
    ):
        _start(job, fleet, platform, storage_url, care, resumed)
        return follow(job, fleet, resumed, on_progress)


def launch_detached(
    job: Job,
    *,
    platform: Platform,
    storage: Storage,
    storage_url: str,
    care: Care = NO_CARE,
    run: str | None = None,
    resumed: Resumed | None = None,
) -> str:
    """The same, leaving the run to itself once its functions have been started; its name."""
    keys = reserve(storage, run or run_name())
    with (
        kept_by_client(keys.run),
        Supervisor(platform, storage, keys, prices=job.prices, on_oom=care.on_oom) as fleet,
    ):
        _start(job, fleet, platform, storage_url, care, resumed)
        fleet.detach()
    return keys.run


def _start(
    job: Job, fleet: Supervisor, platform: Platform, storage_url: str, care: Care, resumed: Resumed | None
) -> None:
    platform.check(job.plan)
    storage, keys, life = fleet.storage, fleet.keys, _life_on(platform.spec, care.life)
    for spec in upload(job, keys, storage, storage_url, platform.url, life=life, resumed=resumed):
        put_document(storage, keys.payload(spec.worker), spec)
        fleet.start(spec)
    record_run(storage, keys, _record(job, keys, storage_url, platform.url, resumed))
    if resumed is not None:
        delete_generation(storage, resumed.keys)


def follow(job: Job, fleet: Supervisor, resumed: Resumed | None, on_progress: Callable[[Progress], None]) -> RunResult:
    """Look after a run until it has ended; what it leaves."""
    losses = _watch(job, fleet, resumed, on_progress)
    fleet.wait(job.message_deadline_s)
    return collect(fleet, job.plan, job.prices, losses)


def _life_on(spec: PlatformSpec, life: Life) -> Life:
    """`life` as the platform limits it."""
    lifetime_s = min([s for s in (life.lifetime_s, spec.lifetime_s) if s is not None], default=None)
    return replace(life, lifetime_s=lifetime_s, cold_start_s=max(life.cold_start_s, spec.cold_start_s))


def _record(job: Job, keys: Keys, storage_url: str, platform_url: str, resumed: Resumed | None) -> RunRecord:
    return RunRecord(
        run=keys.run,
        generation=keys.generation,
        plan=job.plan,
        platform=platform_url,
        storage=storage_url,
        samples=job.samples,
        epochs=job.epochs,
        steps=job.steps,
        first_step=resumed.step if resumed is not None else 0,
        seed=job.seed,
        shuffle=job.shuffle,
        clip_grad_norm=job.clip_grad_norm,
        losses=resumed.losses if resumed is not None else (),
        spent_usd=resumed.spent_usd if resumed is not None else 0.0,
        elapsed_s=resumed.elapsed_s if resumed is not None else 0.0,
    )


def _watch(
    job: Job, fleet: Supervisor, resumed: Resumed | None, on_progress: Callable[[Progress], None]
) -> tuple[float, ...]:
    """Follow the reports of the last stage, step by step; the mean loss of each step."""
    last = len(job.plan.stages) - 1
    losses = list(resumed.losses) if resumed is not None else []
    request_usd = job.plan.estimate.request_usd if job.plan.estimate is not None else 0.0
    samples, began_s, first = 0, 0.0, len(losses)  # from the end of the first step, which waits for the functions
    for step in range(first, job.steps):
        reports = [_step_report(fleet, job, step, f"s{last}.r{r}") for r in range(job.plan.replicas)]
        fleet.progress()
        step_samples = sum(report.samples for report in reports)
        losses.append(sum(report.loss_sum for report in reports) / step_samples)
        samples += step_samples if step > first else 0
        began_s = began_s or time.monotonic()
        on_progress(
            Progress(
                step=step + 1,
                steps=job.steps,
                loss=losses[-1],
                samples_per_s=samples / max(time.monotonic() - began_s, POLL_S),
                cost_usd=fleet.cost_usd() + (step + 1 - first) * request_usd,
            )
        )
    return tuple(losses)


def _step_report(fleet: Supervisor, job: Job, step: int, worker: str) -> StepReport:
    key = fleet.keys.step_report(step, worker)
    until_s = time.monotonic() + job.message_deadline_s
    while True:
        try:
            return get_document(fleet.storage, StepReport, key)
        except KeyMissing:
            fleet.tend()
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"run {fleet.keys.run}: worker {worker} has not ended step {step} "
                    f"within {job.message_deadline_s:g} s"
                ) from None
            time.sleep(POLL_S)


@contextlib.contextmanager
def _objects_removed(storage: Storage, keys: Keys, *, keep: bool) -> Iterator[None]:
    """Delete every object of the run at the end; with `keep`, not of one that can be resumed."""
    try:
        yield
    except BaseException:
        if not keep:
            delete_all(storage, keys)
        raise
    delete_all(storage, keys)
