"""Storage that does something more: wrapped around any back-end."""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from funcpipe.core import LIST_KEYS, RequestCounts
from funcpipe.core.backoff import Backoff
from funcpipe.core.stores import DEFAULT, KINDS
from funcpipe.errors import KeyExists, KeyMissing, StorageBusy
from funcpipe.platforms.base import OPEN, Gate, Storage, batches
from funcpipe.platforms.request_meter import RequestMeter
from funcpipe.platforms.routed import kind_of

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
"""The result of a request."""

RETRY_S = 120.0
"""The default time for which a request is tried again."""

PAUSES = Backoff(first_s=0.1, most_s=5.0)
"""Between two tries of a request."""

_WORRYING_S = 5.0
"""The time that a storage may fail before a warning."""


class StorageWrapper:
    """Passes every request on to the storage `store`; a subclass restates what it does in another way.

    All requests are made by `_ask`, in which a subclass may do something around each of them.
    """

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.watches = store.watches

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        self._ask(f"put {key}", lambda: self._store.put(key, data, if_absent=if_absent, gate=gate))

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing."""
        return self._ask(f"get {key}", lambda: self._store.get(key, start=start, stop=stop, gate=gate))

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        self._ask(f"delete {key}", lambda: self._store.delete(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; missing keys are not an error."""
        self._ask(f"delete {len(keys)} objects", lambda: self._store.delete_many(keys))

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""
        return self._ask(f"list {prefix}", lambda: self._store.list(prefix))

    def touch(self, key: str) -> None:
        """Make an object as young as one that is written now; raises KeyMissing."""
        self._ask(f"touch {key}", lambda: self._store.touch(key))

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause, without a request, as the wrapped storage does."""
        self._store.wait(key, timeout_s, cancel)

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make `request`, which is called `what` in messages."""
        return request()


class Counted(StorageWrapper):
    """Counts with `meter` the requests and bytes that pass through it: wrapped around what makes each request once.

    They count for the kind of the object that is asked for, by its key. A listing counts for the kind of its prefix, or
    for the first of the `kinds` whose objects lie in the store, if those of the prefix do not. Deletions cost nothing,
    and are not counted.
    """

    def __init__(
        self, store: Storage, meter: RequestMeter | None = None, *, kinds: Sequence[str] = (DEFAULT, *KINDS)
    ) -> None:
        super().__init__(store)
        self._meter = meter or RequestMeter()
        self._kinds = tuple(kinds)

    @property
    def traffic(self) -> RequestCounts:
        """The counts so far, of all kinds."""
        return self._meter.counts

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; counted, also when there is one already."""
        try:
            self._store.put(key, data, if_absent=if_absent, gate=gate)
        except KeyExists:
            self._meter.add(RequestCounts(puts=1), kind_of(key))
            raise
        self._meter.add(RequestCounts(puts=1, sent_bytes=memoryview(data).nbytes), kind_of(key))

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; counted, also when there is none."""
        try:
            data = self._store.get(key, start=start, stop=stop, gate=gate)
        except KeyMissing:
            self._meter.add(RequestCounts(gets=1, empty_gets=1), kind_of(key))
            raise
        self._meter.add(RequestCounts(gets=1, received_bytes=len(data)), kind_of(key))
        return data

    def list(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`; counted once for every LIST_KEYS of them, and once if there are none."""
        keys = self._store.list(prefix)
        kind = kind_of(prefix)
        counted = RequestCounts(lists=max(-(-len(keys) // LIST_KEYS), 1))
        self._meter.add(counted, kind if kind in self._kinds else self._kinds[0])
        return keys

    def touch(self, key: str) -> None:
        """Make an object as young as one that is written now; counted as a put, as S3 and OSS bill copies."""
        try:
            self._store.touch(key)
        finally:
            self._meter.add(RequestCounts(puts=1), kind_of(key))


class Retried(StorageWrapper):
    """Makes a request again, after a pause, while the storage is busy: for `deadline_s`, then the error is raised.

    A request that began within that time is waited for. Refusals are not tried again. Until the storage has answered
    once, requests are tried for `first_s` at most, if that is given: it may not be there at all.
    """

    def __init__(
        self,
        store: Storage,
        *,
        deadline_s: float = RETRY_S,
        first_s: float | None = None,
        backoff: Backoff = PAUSES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(store)
        self._deadline_s = deadline_s
        self._first_s = deadline_s if first_s is None else min(first_s, deadline_s)
        self._has_answered = False
        self._backoff = backoff
        self._clock = clock
        self._sleep = sleep

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object. A put refused after a failure, as these very bytes are there, has succeeded."""
        tries = 0

        def put() -> None:
            nonlocal tries
            tries += 1
            try:
                self._store.put(key, data, if_absent=if_absent, gate=gate)
            except KeyExists:
                if tries == 1 or not self._holds(key, data):
                    raise

        self._ask(f"put {key}", put)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; a batch that fails is deleted again, those before it are not."""
        for batch in batches(keys):
            self._ask(f"delete {len(batch)} objects", functools.partial(self._store.delete_many, batch))

    def _holds(self, key: str, data: bytes | memoryview) -> bool:
        """Return True if the object is `data`; it may have been deleted since it was in the way."""
        try:
            return self._store.get(key) == data
        except KeyMissing:
            return False

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        began_s = self._clock()
        for tries in itertools.count(1):
            try:
                answer = request()
                self._has_answered = True
                return answer
            except StorageBusy as error:
                tried_s = self._clock() - began_s
                left_s = (self._deadline_s if self._has_answered else self._first_s) - tried_s
                if left_s <= 0:
                    raise StorageBusy(self._given_up(what, tried_s, tries, error)) from error
                pause_s = min(self._backoff.pause_s(tries), left_s)
                level = logging.INFO if tried_s < _WORRYING_S else logging.WARNING
                _log.log(level, "%s: tried again in %.2f s, for %.0f s more: %s", what, pause_s, left_s, error)
                self._sleep(pause_s)
            except (KeyMissing, KeyExists):
                self._has_answered = True
                raise
        raise AssertionError("the count never ends")

    def _given_up(self, what: str, tried_s: float, tries: int, error: StorageBusy) -> str:
        if self._has_answered or self._first_s == self._deadline_s:
            return f"{what}: the storage failed for {tried_s:.0f} s, {tries} times: {error}"
        return (
            f"{what}: the storage has not answered once in {tried_s:.0f} s, {tries} times: {error}; is its URL right, "
            "and can this machine reach it?"
        )
