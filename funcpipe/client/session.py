"""Where a run runs: its functions, its storage, and what there is of it already."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from funcpipe.client.job import Care, Job
from funcpipe.client.launch import follow, launch, launch_detached
from funcpipe.client.results import Progress, RunResult
from funcpipe.client.site import open_local
from funcpipe.client.supervisor import Supervisor
from funcpipe.core import PlatformSpec, RunRecord
from funcpipe.errors import InvalidValue, PlanError, PlatformError
from funcpipe.partitioner.cost.evaluate import size_of
from funcpipe.platforms.base import Platform, State, Storage
from funcpipe.platforms.catalog import LOCAL, load_spec, open_deployment, open_platform, open_storage
from funcpipe.platforms.local.log_files import kept_by_client
from funcpipe.runstate.functions import started
from funcpipe.runstate.generations import delete_all, find_run, payloads
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import Resumed, recover


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run runs.

    `platform` is the local one, whose functions have the limits of the platform `like`, or a deployment's URL.
    `storage` is a URL, or None for a temporary folder or the deployment's own; `run` a new run's name, None for a drawn
    one; `resume` the run to go on with.
    """

    platform: str = LOCAL
    like: PlatformSpec | None = None
    storage: str | None = None
    run: str | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.platform != LOCAL and self.like is not None:
            raise InvalidValue(
                "like", self.like.name, f"is for the platform {LOCAL!r}: {self.platform} has its own limits"
            )
        if self.platform == LOCAL and self.resume is not None and self.storage is None:
            raise InvalidValue("resume", self.resume, "needs the storage that the run lies in")


ANYWHERE = Place()


def place_of(
    platform: str, like: str | PlatformSpec | None, *, storage: str | None, run: str | None, resume: str | None
) -> Place:
    """The place of these names."""
    imposed = load_spec(like) if isinstance(like, str) else like
    return Place(platform=platform, like=imposed, storage=storage, run=run, resume=resume)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What there is of a run already."""

    record: RunRecord
    saved: Resumed


def find_earlier(place: Place) -> Earlier | None:
    """What is to be gone on with; raises RunUnknown."""
    if place.resume is None:
        return None
    with _open_storage(place) as (_, storage):
        record = find_run(storage, place.resume)
        return Earlier(record=record, saved=recover(storage, record))


def go_back(model: nn.Module, place: Place) -> Earlier | None:
    """Find what is to be gone on with, and give `model` what that had learned."""
    earlier = find_earlier(place)
    if earlier is not None and earlier.saved.state is not None:
        try:
            model.load_state_dict(earlier.saved.state.state_dict(), strict=False)
        except RuntimeError as error:
            raise PlanError(f"run {earlier.record.run} is of another model: {error}") from error
    return earlier


def run_job(
    job: Job, place: Place, care: Care, earlier: Earlier | None, on_progress: Callable[[Progress], None]
) -> RunResult:
    """Train `job`, or watch the run that trains it already, and collect what it leaves."""
    with _open_storage(place) as (url, storage):
        kept = replace(care, keep=care.keep or _lasts(place))
        if earlier is not None:
            _check_same_job(job, earlier.record)
            platform = _still_runs(storage, earlier.record)
            if platform is not None:
                return _attach(job, platform, storage, earlier, kept, on_progress)
        with _functions(job, place) as platform:
            return launch(
                job,
                platform=platform,
                storage=storage,
                storage_url=url,
                care=kept,
                run=place.resume or place.run,
                resumed=earlier.saved if earlier is not None else None,
                on_progress=on_progress,
            )


def start_job(job: Job, place: Place, care: Care, earlier: Earlier | None) -> str:
    """Start to train `job` and leave it to itself; the run's name."""
    if not _lasts(place):
        raise InvalidValue("storage", place.storage, "must be given for a run that is left to itself")
    with _open_storage(place) as (url, storage):
        if earlier is not None:
            _check_same_job(job, earlier.record)
            if _still_runs(storage, earlier.record) is not None:
                raise PlanError(f"run {earlier.record.run} still runs; there is nothing to go on with")
        with _functions(job, place, silent=True) as platform:
            return launch_detached(
                job,
                platform=platform,
                storage=storage,
                storage_url=url,
                care=care,
                run=place.resume or place.run,
                resumed=earlier.saved if earlier is not None else None,
            )


def _attach(
    job: Job,
    platform: Platform,
    storage: Storage,
    earlier: Earlier,
    care: Care,
    on_progress: Callable[[Progress], None],
) -> RunResult:
    """Watch a run that somebody else has started."""
    record = earlier.record
    if replace(record.plan, estimate=None, solver=None) != replace(job.plan, estimate=None, solver=None):
        raise PlanError(f"run {record.run} still runs by another plan; `funcpipe stop {record.run}` ends it before")
    keys = Keys(record.run, record.generation)
    with (
        kept_by_client(keys.run),
        Supervisor(platform, storage, keys, prices=job.prices, on_oom=care.on_oom) as fleet,
    ):
        for spec in payloads(storage, keys):
            fleet.attach(spec)
        known = replace(earlier.saved, losses=record.losses)
        result = follow(job, fleet, known, on_progress)
    delete_all(storage, keys)
    return result


def _check_same_job(job: Job, record: RunRecord) -> None:
    """Whether the steps that were done are steps of `job`; raises PlanError."""
    for name, before, now in (
        ("global_batch", record.plan.global_batch, job.plan.global_batch),
        ("samples", record.samples, job.samples),
        ("seed", record.seed, job.seed),
        ("shuffle", record.shuffle, job.shuffle),
        ("clip_grad_norm", record.clip_grad_norm, job.clip_grad_norm),
    ):
        if before != now:
            raise PlanError(f"run {record.run} has {name} {before}, not {now}; it can only be gone on with as it began")


def _still_runs(storage: Storage, record: RunRecord) -> Platform | None:
    """The platform that functions of the run still run on, if there are any."""
    platform = open_platform(record.platform)
    try:
        found = started(storage, Keys(record.run, record.generation))
        alive = any(platform.status(function.handle).state is State.RUNNING for function in found)
    except PlatformError:
        return None
    return platform if alive else None


def _lasts(place: Place) -> bool:
    """Whether the run's objects may stay where they are."""
    return place.storage is not None or place.platform != LOCAL


def _functions(job: Job, place: Place, *, silent: bool = False) -> contextlib.AbstractContextManager[Platform]:
    if place.platform != LOCAL:
        return contextlib.nullcontext(open_deployment(place.platform))
    if place.like is not None:
        for stage in job.plan.stages:
            size_of(stage.size, place.like)  # which refuses a plan for another platform's sizes
    return open_local(place.like, silent=silent)


@contextlib.contextmanager
def _open_storage(place: Place) -> Iterator[tuple[str, Storage]]:
    if place.storage is not None:
        yield place.storage, open_storage(place.storage)
        return
    if place.platform != LOCAL:
        urls = open_deployment(place.platform).storage_urls
        yield urls.functions, open_storage(urls.client)
        return
    with tempfile.TemporaryDirectory(prefix="funcpipe-", ignore_cleanup_errors=False) as folder:
        url = Path(folder).resolve().as_uri()
        yield url, open_storage(url)
