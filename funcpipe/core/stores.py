"""The stores of a platform, the requests that they count and bill, and the store of each kind of object."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from funcpipe.core import checks
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.texts import without_secrets
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Storage requests and bytes. `empty_gets`, among the gets, found no object; deletions cost nothing, and count not.

    A request counts if a cloud bills it: if it was answered, or refused for what it asked (no such object, or one that
    is there already), but not if the server failed
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html, November 2026).
    """

    puts: int = 0
    lists: int = 0
    gets: int = 0
    empty_gets: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            puts=self.puts + other.puts,
            lists=self.lists + other.lists,
            gets=self.gets + other.gets,
            empty_gets=self.empty_gets + other.empty_gets,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
        )


class RequestPrices(Protocol):
    """The prices of a store's requests and bytes."""

    def counted_usd(self, counts: RequestCounts) -> float:
        """Return dollars for the requests and the bytes in `counts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsByKind:
    """Storage requests and bytes for messages, sums and checkpoints; `default` has all that is for none of them."""

    default: RequestCounts = RequestCounts()
    messages: RequestCounts = RequestCounts()
    sums: RequestCounts = RequestCounts()
    checkpoints: RequestCounts = RequestCounts()

    def __add__(self, other: "CountsByKind") -> "CountsByKind":
        theirs = other.by_kind
        return CountsByKind(**{kind: counts + theirs[kind] for kind, counts in self.by_kind.items()})

    @property
    def by_kind(self) -> dict[str, RequestCounts]:
        """The counts of each kind."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def total(self) -> RequestCounts:
        """The counts of all kinds together."""
        return sum(self.by_kind.values(), RequestCounts())

    def usd(self, store_of: Callable[[str], RequestPrices]) -> float:
        """Return dollars for all of it, where the objects of a kind are in the store that `store_of` gives."""
        return sum(store_of(kind).counted_usd(counts) for kind, counts in self.by_kind.items())


GB = 2**30
"""The bytes of a GB as AWS bills it: in an example of the S3 FAQ, a GB is 1,048,576 KB (2026-11)."""

DEFAULT = "default"
"""The store that a platform's specification describes by its own fields."""

AUTO = "auto"
"""The user's choice of whichever store is best."""

_PRICES = ("price_put_usd", "price_get_usd", "price_sent_usd_gb", "price_received_usd_gb", "price_usd_h")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTerms:
    """The latency, prices of requests and limits of a store: of one by its name, or of the default one of a platform.

    Every operation takes `latency_s` before its bytes move. All functions together move at most `shared_bytes_s` in
    each direction; None means that only the function's own link limits it. It takes at most `puts_s` and `gets_s`
    requests a second below one prefix, and `requests_s` of either kind of an account in all; None means any number.
    Objects have at most `largest_bytes`. Where `polled`, it does not tell of new objects: a reader asks again and again
    until the object is there, one latency after the other. Asking for what is not there costs `price_empty_get_usd`, or
    as much as any other get if that is None.
    """

    latency_s: float
    price_put_usd: float
    price_get_usd: float
    price_empty_get_usd: float | None = None
    shared_bytes_s: float | None = None
    puts_s: float | None = None
    gets_s: float | None = None
    largest_bytes: int | None = None
    requests_s: float | None = field(default=None, metadata=IF_CHANGED)
    polled: bool = field(default=False, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        for name in ("latency_s", "price_put_usd", "price_get_usd"):
            checks.at_least(name, getattr(self, name), 0)
        if self.price_empty_get_usd is not None:
            checks.at_least("price_empty_get_usd", self.price_empty_get_usd, 0)
        for name in ("shared_bytes_s", "puts_s", "gets_s", "requests_s", "largest_bytes"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))

    @property
    def poll_s(self) -> float:
        """The seconds between two requests for an object that has not come yet."""
        return self.latency_s if self.polled else 0.0

    @property
    def empty_get_usd(self) -> float:
        """Dollars for asking for an object that is not there."""
        return self.price_get_usd if self.price_empty_get_usd is None else self.price_empty_get_usd

    def request_usd(self, puts: float, gets: float, empty_gets: float = 0) -> float:
        """Return dollars for requests; `empty_gets`, among the gets, found no object."""
        return puts * self.price_put_usd + (gets - empty_gets) * self.price_get_usd + empty_gets * self.empty_get_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec(StoreTerms):
    """One store that functions of a platform can reach.

    One function moves at most `bytes_s` in each direction; None means that only its own link limits it. Besides
    requests it may cost by the GB, sent to it or received from it, and `price_usd_h` for every hour that it is there.
    What a `durable` store has acknowledged outlives its servers. `sources` tells where each value was published or
    measured.
    """

    name: str
    what: str
    price_sent_usd_gb: float = 0.0
    price_received_usd_gb: float = 0.0
    price_usd_h: float = 0.0
    bytes_s: float | None = None
    durable: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        StoreTerms.__post_init__(self)
        for name in _PRICES:
            checks.at_least(name, getattr(self, name), 0)
        if self.bytes_s is not None:
            checks.positive("bytes_s", self.bytes_s)
        known = {item.name for item in fields(StoreSpec)}
        for name in self.sources:
            if name not in known:
                raise InvalidValue("sources", name, "must name fields of a store")

    @property
    def has_price(self) -> bool:
        """True if it costs anything."""
        return any(getattr(self, name) for name in _PRICES)

    @property
    def costs_by_byte(self) -> bool:
        """True if bytes cost anything besides requests."""
        return bool(self.price_sent_usd_gb or self.price_received_usd_gb)

    def times(self, factor: float) -> "StoreSpec":
        """Return the same store with all its prices multiplied."""
        empty_usd = self.price_empty_get_usd
        prices = {name: factor * getattr(self, name) for name in _PRICES}
        return replace(self, **prices, price_empty_get_usd=empty_usd and factor * empty_usd)

    def transfer_usd(self, sent_bytes: float, received_bytes: float) -> float:
        """Return dollars for bytes that functions send to it and receive from it."""
        return (sent_bytes * self.price_sent_usd_gb + received_bytes * self.price_received_usd_gb) / GB

    def asked_usd(self, counts: RequestCounts) -> float:
        """Return dollars for the requests in `counts`. A listing costs as much as a put, at S3 and at OSS."""
        return self.request_usd(counts.puts + counts.lists, counts.gets, counts.empty_gets)

    def counted_usd(self, counts: RequestCounts) -> float:
        """Return dollars for the requests and the bytes in `counts`: a run is billed for them, and limited by them."""
        return self.asked_usd(counts) + self.transfer_usd(counts.sent_bytes, counts.received_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The store, by name, of messages between stages, of sums of gradients, and of checkpoints.

    All else that a run keeps, such as its records and leases, is in the platform's default store. In what is asked
    for, a name may be "auto": whichever is best.
    """

    messages: str = DEFAULT
    sums: str = DEFAULT
    checkpoints: str = DEFAULT

    @classmethod
    def of(cls, asked: "Stores | str | Mapping[str, str]") -> "Stores":
        """Return the stores that are asked for: "default", "auto" for all kinds, or the name of a store for some kinds.

        Raises InvalidValue for a kind that there is not.
        """
        if isinstance(asked, Stores):
            return asked
        if isinstance(asked, str):
            if asked not in (DEFAULT, AUTO):
                raise InvalidValue("stores", asked, "must be 'default', 'auto', or a store for some of its kinds")
            return cls(messages=asked, sums=asked, checkpoints=asked)
        if not isinstance(asked, Mapping):
            raise InvalidValue("stores", asked, "must be 'default', 'auto', or a store for some of its kinds")
        for kind in asked:
            if kind not in KINDS:
                raise InvalidValue("stores", kind, f"must name kinds among {', '.join(KINDS)}")
        return replace(cls(), **asked)

    @property
    def names(self) -> tuple[str, ...]:
        """All stores, each once."""
        return tuple(dict.fromkeys((self.messages, self.sums, self.checkpoints)))

    def of_kind(self, kind: str) -> str:
        """Return the store of objects of `kind`, one of KINDS or "default"."""
        return DEFAULT if kind == DEFAULT else str(getattr(self, kind))

    @property
    def is_default(self) -> bool:
        """True if everything is in the platform's default store."""
        return self == DEFAULT_STORES


DEFAULT_STORES = Stores()
"""Everything in the platform's default store."""

KINDS = tuple(item.name for item in fields(Stores))
"""The kinds of objects whose store can be chosen."""

_OF_SUMS = re.compile(r"(?:put|get)-(?:split|merged|tied)")


def kind_moved(task: str) -> str:
    """Return the kind of the object that `task` puts or gets, which replicas or stages exchange: messages, or sums.

    >>> kind_moved("put-split.s0.r1.p0.k2"), kind_moved("get-activation.s1.r0.m3")
    ('sums', 'messages')
    """
    return "sums" if _OF_SUMS.match(task) else "messages"


_BY_KIND = re.compile(rf"(?:^|,)({DEFAULT}|{'|'.join(KINDS)})=")


def urls_by_kind(storage: str) -> dict[str, str]:
    """Return the URLs in `storage`, which reads `default=URL,messages=URL,…`, or is one URL of everything, "default".

    >>> urls_by_kind("default=s3://bucket/runs,messages=redis://host/0")
    {'default': 's3://bucket/runs', 'messages': 'redis://host/0'}

    Raises InvalidValue for a kind without a URL, or if that of "default" is missing.
    """
    if not _BY_KIND.match(storage):
        return {DEFAULT: storage}
    _, *parts = _BY_KIND.split(storage)
    urls = dict(zip(parts[::2], parts[1::2], strict=True))
    if DEFAULT not in urls or not all(urls.values()):
        raise InvalidValue(
            "storage", without_secrets(storage), "must have a URL for each kind it names, and for default"
        )
    return urls


def storage_of(urls: str | Mapping[str, str]) -> str:
    """Return the text that `urls_by_kind` reads, of URLs by kind; a single URL stays as it is. Raises InvalidValue."""
    if isinstance(urls, str):
        return urls
    for kind in urls:
        if kind not in (DEFAULT, *KINDS):
            raise InvalidValue("storage", kind, f"must have URLs for {', '.join((DEFAULT, *KINDS))}")
    storage = ",".join(f"{kind}={url}" for kind, url in urls.items())
    urls_by_kind(storage or f"{DEFAULT}=")
    return storage
