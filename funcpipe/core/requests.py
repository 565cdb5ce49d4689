"""Storage requests and bytes as they are counted: together, and by the kind of objects that they are for."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol


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
