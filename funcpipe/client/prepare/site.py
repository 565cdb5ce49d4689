"""A platform with a storage that its functions reach."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from funcpipe.core import PlatformSpec
from funcpipe.core.process import ending_interrupts, temporary_folder
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.catalog import (
    LOCAL,
    is_deployment,
    is_ray,
    load_spec,
    open_deployment,
    open_storage,
    ray_cluster,
)
from funcpipe.platforms.local.platform import LocalPlatform, fork_hosts_from_here, local_functions, preload_functions
from funcpipe.platforms.process import usable_processors
from funcpipe.worker.invocation import WITH_TORCH

if TYPE_CHECKING:
    from funcpipe.platforms.ray.platform import RayPlatform
    from funcpipe.profiler.remote.layers import PlatformTimer
_PRELOADED = ("torch", *WITH_TORCH.values())


@dataclass(frozen=True)
class Site:
    """A platform for functions with the storage that they share: `storage`, which they open by `storage_url`."""

    platform: Platform
    storage: Storage
    storage_url: str

    def timing(self, *, max_usd: float | None = None) -> "AbstractContextManager[PlatformTimer]":
        """A timer of layers in functions of every size here, for at most `max_usd`."""
        from funcpipe.profiler.remote.layers import platform_timer

        return platform_timer(self.platform, self.storage, self.storage_url, max_usd=max_usd)

    def measure(self, *, max_usd: float | None = None) -> PlatformSpec:
        """The platform's specification with what functions of every size measure, for at most `max_usd`."""
        from funcpipe.profiler.remote.platform import measure_platform

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
    )


def expect_local() -> None:
    """Begin to load what local functions need, beside all that is checked before they start."""
    preload_functions(_PRELOADED)


def fork_from_here(as_new: Callable[[], object]) -> None:
    """Load torch, and have local functions forked from this process, a command that has not used torch yet.

    `as_new` takes back, in what is forked, what the command has set up for itself.
    """
    fork_hosts_from_here(_PRELOADED, as_new=as_new)


def open_ray(url: str) -> "AbstractContextManager[RayPlatform]":
    """Functions in tasks of the Ray cluster that `url` names, or of a Ray that is started here meanwhile."""
    address, spec = ray_cluster(url)
    from funcpipe.platforms.ray.platform import ray_functions  # where Ray is missing, a wrong URL is reported first

    return ray_functions(address, spec)


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
    functions = open_ray(platform) if is_ray(platform) else open_local(like)
    with ending_interrupts(), functions as started, temporary_folder() as folder:
        url = Path(folder).resolve().as_uri()
        yield Site(started, open_storage(url), url)
