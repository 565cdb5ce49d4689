"""The session of a run: the storage of its objects, and the platform of its functions."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from funcpipe.client.prepare.site import Site, expect_local, open_local, open_ray
from funcpipe.core import PlatformSpec, RunSettings
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
    ray_cluster,
)
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.keyring import signed


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
                return stack.enter_context(open_ray(platform))
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
            expect=expect_local if platform == LOCAL else lambda: None,
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
