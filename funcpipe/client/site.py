"""A platform with a storage that its functions reach, opened to measure something there."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from funcpipe.core import PlatformSpec
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.catalog import LOCAL, load_spec, open_deployment, open_storage
from funcpipe.platforms.local.platform import LocalPlatform, local_functions
from funcpipe.platforms.processors import usable_processors
from funcpipe.profiler.remote.layers import OnPlatform, on_platform
from funcpipe.profiler.remote.platform import measure_platform

_PRELOADED = ("torch", "funcpipe.worker.loop", "funcpipe.profiler.remote.function")


@dataclass(frozen=True)
class Site:
    """Where functions run and what they share: `storage`, which they open by `storage_url`."""

    platform: Platform
    storage: Storage
    storage_url: str

    def timing(self, *, max_usd: float | None = None) -> AbstractContextManager[OnPlatform]:
        """What times layers in functions of every size here, for at most `max_usd`."""
        return on_platform(self.platform, self.storage, self.storage_url, max_usd=max_usd)

    def measure(self, *, max_usd: float | None = None) -> PlatformSpec:
        """The platform's specification with what functions of every size measure, for at most `max_usd`."""
        return measure_platform(self.platform, self.storage, self.storage_url, max_usd=max_usd)


def open_local(like: PlatformSpec | None = None, *, silent: bool = False) -> AbstractContextManager[LocalPlatform]:
    """Functions of this machine, which train or measure; with the limits of `like` imposed on them, if given.

    With `silent`, what they print is lost.
    """
    imposed = None if like is None else replace(like, shared_cores=usable_processors())
    return local_functions(
        imposed or load_spec(LOCAL),
        "funcpipe.platforms.entry.function:main",
        preload=_PRELOADED,
        imposed=imposed is not None,
        silent=silent,
    )


@contextmanager
def open_site(platform: str = LOCAL, *, like: PlatformSpec | None = None) -> Iterator[Site]:
    """The local platform with a temporary folder, `like` another one; or the deployment with that URL, and its sizes.

    Raises InvalidValue for a platform that functions cannot run on.
    """
    if platform != LOCAL:
        if like is not None:
            raise InvalidValue("like", like.name, f"is for the platform {LOCAL!r}: {platform} has its own limits")
        deployment = open_deployment(platform).of_deployed_sizes()
        urls = deployment.storage_urls
        yield Site(deployment, open_storage(urls.client), urls.functions)
        return
    with open_local(like) as local, tempfile.TemporaryDirectory(prefix="funcpipe-") as folder:
        url = Path(folder).resolve().as_uri()
        yield Site(local, open_storage(url), url)
