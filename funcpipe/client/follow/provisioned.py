"""Functions that a platform keeps ready while a run lasts, if it is to."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

from funcpipe.client.control.stopping import release
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.client.prepare.session import prices_at
from funcpipe.core.provisioned import first_life
from funcpipe.errors import DeadlineExceeded, InputError, PlatformError
from funcpipe.platforms.base import Platform, ProvisioningPlatform

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def provisioned(prepared: PreparedRun, *, detached: bool = False) -> Iterator[PreparedRun]:
    """Keep the run's functions ready within this context, as is planned; functions of a `detached` run stay so.

    The run is yielded as it is to begin: on demand, after a warning, if its functions cannot be kept ready.
    """
    ready, job = _ready(prepared), prepared.job
    if ready is None:
        yield replace(prepared, provisioned=None)
        return
    stays = False
    try:
        yield replace(prepared, platform=ready, job=replace(job, prices=prices_at(ready.url, job.prices, given=True)))
        stays = detached
    finally:
        if not stays:
            release(ready, job.plan, prepared.name)


def _ready(prepared: PreparedRun) -> Platform | None:
    """The platform whose functions are ready now; None where they are to be started on demand."""
    chosen, platform, run = prepared.provisioned, prepared.platform, prepared.name
    if chosen is None or not isinstance(platform, ProvisioningPlatform):
        return None
    _log.info("run %s: waits until its functions are ready", run)
    try:
        return platform.provision(prepared.job.plan, run, chosen)
    except (InputError, PlatformError, DeadlineExceeded) as error:
        _log.warning("run %s: functions are started on demand, as they are not kept ready: %s", run, error)
        return None


def first_life_of(prepared: PreparedRun, stage: int, replica: int) -> float:
    """The share of its life after which a worker's first function hands over: one by one, where some are kept ready."""
    position = replica * len(prepared.stages) + stage
    return 1.0 if prepared.provisioned is None else first_life(position, prepared.job.plan.workers)
