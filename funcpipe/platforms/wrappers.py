"""Storage that does something more: wrapped around any back-end."""

import functools
import itertools
import logging
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from funcpipe.core import LIST_KEYS, RequestCounts
from funcpipe.core.backoff import Backoff
from funcpipe.core.stores import DEFAULT, KINDS, kind_moved
from funcpipe.errors import KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate, RequestMeter, Storage, batches

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

    All requests are made by `_ask`, in which a subclass may do something around each of them, and to `_store_of` a key.
    """

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.watches = store.watches

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        self._ask(f"put {key}", lambda: self._store_of(key).put(key, data, if_absent=if_absent, gate=gate))

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing."""
        return self._ask(f"get {key}", lambda: self._store_of(key).get(key, start=start, stop=stop, gate=gate))

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        self._ask(f"delete {key}", lambda: self._store_of(key).delete(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; missing keys are not an error."""
        self._ask(f"delete {len(keys)} objects", lambda: self._store.delete_many(keys))

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""
        return self._ask(f"list {prefix}", lambda: self._store.list(prefix))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, with what changes when other bytes are put there."""
        return self._ask(f"list {prefix}", lambda: self._store.etags(prefix))

    def touch(self, key: str) -> None:
        """Make an object as young as one that is written now; raises KeyMissing."""
        self._ask(f"touch {key}", lambda: self._store_of(key).touch(key))

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause, without a request, as the wrapped storage does."""
        self._store_of(key).wait(key, timeout_s, cancel)

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make `request`, which is called `what` in messages."""
        return request()

    def _store_of(self, key: str) -> Storage:
        return self._store


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
        self._count_list(prefix, len(keys))
        return keys

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, and their etags; counted as a listing."""
        found = self._store.etags(prefix)
        self._count_list(prefix, len(found))
        return found

    def touch(self, key: str) -> None:
        """Make an object as young as one that is written now; counted as a put, as S3 and OSS bill copies."""
        try:
            self._store.touch(key)
        finally:
            self._meter.add(RequestCounts(puts=1), kind_of(key))

    def _count_list(self, prefix: str, found: int) -> None:
        kind = kind_of(prefix)
        counted = RequestCounts(lists=max(-(-found // LIST_KEYS), 1))
        self._meter.add(counted, kind if kind in self._kinds else self._kinds[0])


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
                pause_s = min(self._backoff.pause_s(tries, tried_s), left_s)
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


_SLOW_S = 1.0
"""An answer with a small object that takes longer is slow: S3 and OSS take some 20 ms."""

_SMALL_BYTES = 64 * 1024
_TIMED, _SLOW = 20, 10
"""The number of last small answers, and of slow ones among them that are not by chance."""

_REMEMBERED = 64
_LAG_S = 60.0
"""The time after its writing after which a missing object has been deleted."""


class Timed(StorageWrapper):
    """Warns once if `store`, called `name` in the warning, answers slowly, and once if its reads lag behind writes."""

    def __init__(self, store: Storage, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store)
        self._name = name
        self._clock = clock
        self._slow: deque[float] = deque(maxlen=_TIMED)
        self._written: OrderedDict[str, float] = OrderedDict()
        self._warned: set[str] = set()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; when that was is remembered."""
        began_s = self._clock()
        self._store.put(key, data, if_absent=if_absent, gate=gate)
        now_s = self._clock()
        self._answered(now_s - began_s, memoryview(data).nbytes)
        self._written[key] = now_s
        if len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object, which must be there if it was written here just now."""
        began_s = self._clock()
        try:
            data = self._store.get(key, start=start, stop=stop, gate=gate)
        except KeyMissing:
            self._answered(self._clock() - began_s, 0)
            self._missed(key, began_s)
            raise
        self._answered(self._clock() - began_s, len(data))
        return data

    def delete(self, key: str) -> None:
        """Remove an object; it may be missing from now on."""
        self._written.pop(key, None)
        self._store.delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; they may be missing from now on."""
        for key in keys:
            self._written.pop(key, None)
        self._store.delete_many(keys)

    def _answered(self, seconds: float, moved_bytes: int) -> None:
        if moved_bytes > _SMALL_BYTES:
            return
        self._slow.append(seconds)
        slow = sorted(taken_s for taken_s in tuple(self._slow) if taken_s > _SLOW_S)
        if len(slow) >= _SLOW:
            self._warn(
                "slow",
                f"{self._name} answers slowly: {len(slow)} of the last {len(self._slow)} answers with little or no "
                f"data took longer than {_SLOW_S:g} s, the longest {slow[-1]:.1f} s; each step waits for several",
            )

    def _missed(self, key: str, asked_s: float) -> None:
        written_s = self._written.get(key)
        if written_s is not None and asked_s - written_s <= _LAG_S:
            self._warn(
                "lag",
                f"reads of {self._name} lag behind writes: {key} is not found {asked_s - written_s:.1f} s after it was "
                "written, unless others have deleted it; a run on such a storage is slow, and may end: use one whose "
                "reads find what was written before",
            )

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s", text)


_GENERATION = r"(?:[0-9a-f]{3}/)?g\d{4}(?:-[0-9a-f]+)?"
_KEY = re.compile(rf"[^/]+/{_GENERATION}/(messages|checkpoints)/(?:[^/]+/\d{{8}}/(.+))?")
_FOLDER = re.compile(rf"[^/]+/(?:generations|owner|{_GENERATION}/(?!messages/|checkpoints/)[^/]+)/")


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


class Routed(StorageWrapper):
    """Several storages as one: `stores` has one for "default", and for some other kinds of objects.

    The key names the kind, as `runstate.keys` makes it. Activations, their gradients, scores and norms are messages;
    what replicas exchange to sum gradients, and gradients of tied parameters, are sums. All else is in the default one:

        run-1/000/g0000-3fa9/messages/s0.r0/00000007/put-activation.s0.r0.m1.k0    messages
        run-1/000/g0000-3fa9/messages/s0.r0/00000007/put-split.s0.r0.k2            sums
        run-1/g0000-3fa9/checkpoints/s0/00000040.0                                 checkpoints
        run-1/g0000-3fa9/leases/s0.r0/00000000                                     default
    """

    def __init__(self, stores: Mapping[str, Storage]) -> None:
        super().__init__(stores[DEFAULT])
        self._stores = {kind: stores.get(kind, stores[DEFAULT]) for kind in (DEFAULT, *KINDS)}
        self.watches = all(store.watches for store in self._each())

    def delete_many(self, keys: Sequence[str]) -> None:
        """As the storages of their kinds; what one cannot remove does not keep others from removing theirs."""
        failure: StorageError | None = None
        for store in self._each():
            try:
                store.delete_many([key for key in keys if self._store_of(key) is store])
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys of all storages that may hold some, sorted."""
        return tuple(sorted({key for store in self._asked(prefix) for key in store.list(prefix)}))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys of all storages that may hold some, and their etags."""
        return {key: etag for store in self._asked(prefix) for key, etag in store.etags(prefix).items()}

    def _store_of(self, key: str) -> Storage:
        return self._stores[kind_of(key)]

    def _asked(self, prefix: str) -> Iterator[Storage]:
        """Yield the storages that may hold objects whose keys begin with `prefix`."""
        return iter({id(store): store for store in (self._stores[kind] for kind in _kinds_below(prefix))}.values())

    def _each(self) -> Iterator[Storage]:
        return iter({id(store): store for store in self._stores.values()}.values())
