"""The place of a run: the platform and the storage of a site, a run's session there, and the prices of its region."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from funcpipe.core import Plan, PlatformSpec, RunSettings
from funcpipe.core.platform import in_region
from funcpipe.core.process import ending_interrupts, temporary_folder
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import OpenPlatform, Platform, RequestMeter, Storage
from funcpipe.platforms.catalog import (
    LOCAL,
    is_deployment,
    is_ray,
    load_spec,
    open_deployment,
    open_platform,
    open_storage,
    planned_spec,
    priced_in,
    ray_cluster,
    url_region,
    url_share,
)
from funcpipe.platforms.local.platform import LocalPlatform, fork_hosts_from_here, local_functions, preload_functions
from funcpipe.platforms.process import usable_processors
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.signing import signed
from funcpipe.worker.invocation import WITH_TORCH

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from funcpipe.platforms.ray.platform import RayPlatform
    from funcpipe.profiler.remote.measuring import PlatformTimer
_PRELOADED = ("torch", *WITH_TORCH.values(), "funcpipe.worker.invocation", "funcpipe.worker.deferred_compiler")


@dataclass(frozen=True)
class Site:
    """A platform for functions with the storage that they share: `storage`, which they open by `storage_url`."""

    platform: Platform
    storage: Storage
    storage_url: str

    def timing(self, *, max_usd: float | None = None) -> "AbstractContextManager[PlatformTimer]":
        """A timer of layers in functions of every size here, for at most `max_usd`."""
        from funcpipe.profiler.remote.measuring import platform_timer

        return platform_timer(self.platform, self.storage, self.storage_url, max_usd=max_usd)

    def measure(self, *, max_usd: float | None = None) -> PlatformSpec:
        """The platform's specification with what functions of every size measure, for at most `max_usd`."""
        from funcpipe.profiler.remote.measuring import measure_platform

        return measure_platform(self.platform, self.storage, self.storage_url, max_usd=max_usd)


def open_local(like: PlatformSpec | None = None, *, silent: bool = False) -> AbstractContextManager[LocalPlatform]:
    """Functions on this machine, which train or measure; they have the limits of the platform `like`, if it is given.

    With `silent`, what they print is kept in their logs alone.
    """
    imposed = None if like is None else replace(like, shared_cores=usable_processors())
    return local_functions(
        imposed or load_spec(LOCAL),
        "funcpipe.platforms.entry:main",
        preload=_PRELOADED,
        imposed=imposed is not None,
        silent=silent,
        watches=True,
        load="funcpipe.platforms.entry:load",
    )


def _expect_local() -> None:
    """Begin to load what local functions need, beside all that is checked before they start."""
    preload_functions(_PRELOADED)


def fork_from_here(as_new: Callable[[], object]) -> None:
    """Load torch, and have local functions forked from this process, a command that has not used torch yet.

    `as_new` takes back, in what is forked, what the command has set up for itself.
    """
    fork_hosts_from_here(_PRELOADED, as_new=as_new)


def _open_ray(url: str) -> "AbstractContextManager[RayPlatform]":
    """Functions in tasks of the Ray cluster that `url` names, or of a Ray that is started here meanwhile."""
    address, spec = ray_cluster(url)
    from funcpipe.platforms.ray.platform import ray_functions  # where Ray is missing, a wrong URL is reported first

    return ray_functions(address, spec)


@contextmanager
def one_cluster(platform: str) -> Iterator[None]:
    """Start Ray once, or connect to it once, for all that is done within this context, if `platform` is Ray."""
    if is_ray(platform):
        with ending_interrupts(), _open_ray(platform):
            yield
    else:
        yield


@contextmanager
def open_site(platform: str = LOCAL, *, like: PlatformSpec | None = None) -> Iterator[Site]:
    """A platform to measure on: functions on this machine, with the limits of `like`, and a temporary folder.

    Or the deployment of that URL, with its own storage, and only the sizes that are deployed. Raises InvalidValue for a
    platform that cannot run functions.
    """
    if platform != LOCAL and like is not None:
        raise InvalidValue("like", like.name, f"is for the platform {LOCAL!r}: {platform} has its own limits")
    if is_ray(platform) and ray_cluster(platform)[0].is_shared:
        raise InvalidValue(
            "platform", platform, "must be ray://local: functions on a cluster measure with no storage of this machine"
        )
    if is_deployment(platform):
        deployment = open_deployment(platform).of_deployed_sizes()
        urls = deployment.storage_urls
        yield Site(deployment, open_storage(urls.client), urls.functions)
        return
    functions = _open_ray(platform) if is_ray(platform) else open_local(like)
    with ending_interrupts(), functions as started, temporary_folder() as folder:
        url = Path(folder).resolve().as_uri()
        yield Site(started, open_storage(url), url)


@dataclass(frozen=True, kw_only=True)
class Session:
    """The storage of a run, which functions open by `storage_url`, and how to open its platform.

    `functions` starts new functions; it is called once all other checks are made. `reopen` finds the platform of
    functions that run already, by its URL. `like` is the platform whose limits are imposed on local functions. Objects
    of a run that has failed stay if the storage `lasts`, for some days if it is a deployment's own, which `expires`.
    `meter` counts what this client asks of the storage. `expect` is called once functions are likely to be wanted.
    """

    storage: Storage
    storage_url: str
    functions: Callable[[], Platform]
    reopen: OpenPlatform = open_platform
    like: PlatformSpec | None = None
    lasts: bool = False
    expires: bool = False
    meter: RequestMeter = field(default_factory=RequestMeter)
    expect: Callable[[], None] = lambda: None


def session_on(site: Site, *, reopen: OpenPlatform = open_platform) -> Session:
    """A session on a platform and a storage that are open already."""
    meter = RequestMeter()
    return Session(
        storage=signed(Counted(site.storage, meter)),
        storage_url=site.storage_url,
        functions=lambda: site.platform,
        reopen=reopen,
        meter=meter,
    )


@contextlib.contextmanager
def open_session(
    platform: str,
    like: str | PlatformSpec | None,
    settings: RunSettings,
    *,
    silent: bool = False,
    detached: bool = False,
) -> Iterator[Session]:
    """The storage and the functions that `platform`, `like` and `settings` name; closed afterwards.

    With `silent`, what local functions print is kept in their logs alone. Raises InvalidValue, or PlatformRefused where
    no run can be left to itself that is to be `detached`.
    """
    imposed = load_spec(like) if isinstance(like, str) else like
    if platform != LOCAL and imposed is not None:
        raise InvalidValue("like", imposed.name, f"is for the platform {LOCAL!r}: {platform} has its own limits")
    if not is_deployment(platform) and settings.resume is not None and settings.storage is None:
        raise InvalidValue("resume", settings.resume, "needs the storage that the run lies in")
    if detached and is_ray(platform):
        ray_cluster(platform)[0].check_detachable()
    meter = RequestMeter()
    with ending_interrupts(), contextlib.ExitStack() as stack:
        url, storage = _storage(platform, settings, stack, meter)

        def functions() -> Platform:
            if is_deployment(platform):
                return open_deployment(platform, meter=meter, known=settings.prices)
            if is_ray(platform):
                return stack.enter_context(_open_ray(platform))
            return stack.enter_context(open_local(imposed, silent=silent))

        lasts = settings.storage is not None or is_deployment(platform)
        yield Session(
            storage=signed(storage),
            storage_url=url,
            functions=functions,
            reopen=functools.partial(open_platform, meter=meter),
            like=imposed,
            lasts=lasts,
            expires=settings.storage is None and is_deployment(platform),
            meter=meter,
            expect=_expect_local if platform == LOCAL else lambda: None,
        )


def _storage(
    platform: str, settings: RunSettings, stack: contextlib.ExitStack, meter: RequestMeter
) -> tuple[str, Storage]:
    """The URL by which functions open the storage, and the storage as this client opens it."""
    retry_s = settings.message_deadline_s
    if settings.storage is not None:
        return settings.storage, open_storage(settings.storage, retry_s=retry_s, meter=meter)
    if is_ray(platform) and ray_cluster(platform)[0].is_shared:
        rule = "must be given for a cluster: a folder that all of its nodes share, or object storage"
        raise InvalidValue("storage", settings.storage, rule)
    if is_deployment(platform):
        urls = open_deployment(platform).storage_urls
        return urls.functions, open_storage(urls.client, retry_s=retry_s, meter=meter)
    folder = stack.enter_context(temporary_folder())
    url = Path(folder).resolve().as_uri()
    return url, open_storage(url, retry_s=retry_s, meter=meter)


def prices_at(url: str, prices: PlatformSpec, *, given: bool) -> PlatformSpec:
    """`prices` in the region of the deployment at `url`, or of functions that it keeps ready.

    Those that are `given` stay as they are, and say so. Logs a warning where the functions of that region share less
    bandwidth than planned.
    """
    region, share = url_region(url), url_share(url)
    if region is not None and region != prices.region:
        prices = _in_region(prices, region, given=given)
    return prices if share is None else prices.priced_at(share)


def _in_region(prices: PlatformSpec, region: str, *, given: bool) -> PlatformSpec:
    there = in_region(prices, region) if given else priced_in(prices, region)
    planned, shared = prices.shared_bytes_s, there.shared_bytes_s
    if planned is not None and shared is not None and shared < planned:
        _log.warning(
            "the plan was made for %s, where all functions together move %.2f GB/s; in %s they move %.2f: training may "
            "be slower than predicted; plan again with --platform '%s?region=%s'",
            *(prices.region, planned / 1e9, region, shared / 1e9, prices.name, region),
        )
    return there


def estimated_prices(
    platform: str | PlatformSpec | None, plan: Plan, *, given: PlatformSpec | None, planned: PlatformSpec | None
) -> PlatformSpec:
    """The prices for estimates of a job by `plan`: the `given` ones, or the `planned` ones at `platform`."""
    prices = given or planned or planned_spec(plan)
    return prices_at(platform, prices, given=given is not None) if isinstance(platform, str) else prices
