"""Several storages as one: each object lies in that of its kind. Wrapped around any back-ends.

The key names the kind, as `runstate.keys` makes it. Activations, their gradients, scores and norms are messages; what
replicas exchange to sum gradients, and gradients of tied parameters, are sums. All else lies in the default storage:

    run-1/g0000-3fa9/messages/s0.r0/00000007/put-activation.s0.r0.m1.k0    messages
    run-1/g0000-3fa9/messages/s0.r0/00000007/put-split.s0.r0.k2            sums
    run-1/g0000-3fa9/checkpoints/s0/00000040.0                             checkpoints
    run-1/g0000-3fa9/leases/s0.r0/00000000                                 default
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence

from funcpipe.core.stores import DEFAULT, KINDS, kind_moved
from funcpipe.errors import StorageError
from funcpipe.platforms.base import OPEN, Gate, Storage

_KEY = re.compile(r"[^/]+/g\d{4}(?:-[0-9a-f]+)?/(messages|checkpoints)/(?:[^/]+/\d{8}/(.+))?")
_FOLDER = re.compile(r"[^/]+/(?:generations|owner|g\d{4}(?:-[0-9a-f]+)?/(?!messages/|checkpoints/)[^/]+)/")


def kind_of(key: str) -> str:
    """Return the kind of the object `key`, or "default"."""
    match = _KEY.match(key)
    if match is None:
        return DEFAULT
    return match[1] if match[2] is None else kind_moved(match[2])


def _kinds_below(prefix: str) -> tuple[str, ...]:
    """Return the kinds of objects whose keys may begin with `prefix`."""
    if _FOLDER.match(prefix):
        return (DEFAULT,)
    match = _KEY.match(prefix)
    if match is None:
        return (DEFAULT, *KINDS)
    return ("messages", "sums") if match[1] == "messages" else (match[1],)


class Routed:
    """Objects in the storage of their kind; `stores` has one for "default", and for some other kinds."""

    def __init__(self, stores: Mapping[str, Storage]) -> None:
        self._stores = {kind: stores.get(kind, stores[DEFAULT]) for kind in (DEFAULT, *KINDS)}
        self.watches = all(store.watches for store in self._each())

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """As the storage of its kind."""
        self._of(key).put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """As the storage of its kind."""
        return self._of(key).get(key, start=start, stop=stop, gate=gate)

    def delete(self, key: str) -> None:
        """As the storage of its kind."""
        self._of(key).delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """As the storages of their kinds; what one cannot remove does not keep others from removing theirs."""
        failure: StorageError | None = None
        for store in self._each():
            try:
                store.delete_many([key for key in keys if self._of(key) is store])
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys of all storages that may hold some, sorted."""
        asked = {id(store): store for store in (self._stores[kind] for kind in _kinds_below(prefix))}
        return tuple(sorted({key for store in asked.values() for key in store.list(prefix)}))

    def touch(self, key: str) -> None:
        """As the storage of its kind."""
        self._of(key).touch(key)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """As the storage of its kind."""
        self._of(key).wait(key, timeout_s, cancel)

    def _of(self, key: str) -> Storage:
        return self._stores[kind_of(key)]

    def _each(self) -> Iterator[Storage]:
        return iter({id(store): store for store in self._stores.values()}.values())
