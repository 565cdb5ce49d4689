"""The link between one function and the storage, as the fragment of the storage's URL: imposed wherever that is opened.

`file:///tmp/objects#latency_s=0.04&upload_bytes_s=7e7&download_bytes_s=7e7`; with `shared_bytes_s` and `shared`, a
folder that all functions know, they have that much in each direction together.
"""

import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from funcpipe.core import FunctionSize, PlatformSpec
from funcpipe.core.stores import DEFAULT, storage_of, urls_by_kind
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Storage
from funcpipe.platforms.local.throttle import OwnPace, Pace, SharedPace, Throttled


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency of each request, bytes per second each way, and the cap that functions share."""

    latency_s: float
    upload_bytes_s: float
    download_bytes_s: float
    shared_bytes_s: float | None = None
    shared: str | None = None

    def __post_init__(self) -> None:
        if (self.shared_bytes_s is None) != (self.shared is None):
            raise InvalidValue("shared", self.shared, "must be given together with shared_bytes_s")

    def impose(self, store: Storage) -> Storage:
        """Return `store` as it is seen through this link."""
        return Throttled(
            store,
            latency_s=self.latency_s,
            upload=self._paces(self.upload_bytes_s, "upload"),
            download=self._paces(self.download_bytes_s, "download"),
        )

    def on(self, url: str) -> str:
        """Return the URL of a storage, or those of several, which may have another link already, with this one."""
        words = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        linked = {
            kind: urlsplit(one)._replace(fragment=urlencode(words)).geturl() for kind, one in urls_by_kind(url).items()
        }
        return linked[DEFAULT] if len(linked) == 1 else storage_of(linked)

    def _paces(self, bytes_s: float, direction: str) -> list[Pace]:
        paces: list[Pace] = [OwnPace(bytes_s)]
        if self.shared_bytes_s is not None and self.shared is not None:
            paces.append(SharedPace(self.shared_bytes_s, os.path.join(self.shared, direction)))
        return paces


def link_of(spec: PlatformSpec, size: FunctionSize, folder: str) -> Link:
    """Return the link of functions of `size`; those of one `folder` share the platform's cap."""
    return Link(
        latency_s=spec.latency_s,
        upload_bytes_s=size.upload_bytes_s,
        download_bytes_s=size.download_bytes_s,
        shared_bytes_s=spec.shared_bytes_s,
        shared=None if spec.shared_bytes_s is None else folder,
    )


def read_link(fragment: str) -> Link:
    """Return the link that the fragment of a URL describes; raises InvalidValue."""
    words = dict(parse_qsl(fragment, keep_blank_values=True))
    shared = words.pop("shared", None)
    try:
        return Link(**{name: float(text) for name, text in words.items()}, shared=shared)
    except (TypeError, ValueError):
        rule = "must read latency_s=…&upload_bytes_s=…&download_bytes_s=…"
        raise InvalidValue("link", fragment, rule) from None
