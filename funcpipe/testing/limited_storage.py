"""Storage that takes so many requests a second below one prefix, as S3 does, wrapped around any back-end."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from funcpipe.core import checks
from funcpipe.errors import StorageBusy
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import StorageWrapper


def first_folders(key: str) -> str:
    """Return the run and the folder below it that an object lies in.

    >>> first_folders("run-1/100/g0000-3fa9/messages/s0.r1/00000007/put-split.s0.r1.k2")
    'run-1/100'
    """
    return "/".join(key.split("/")[:2])


class LimitedStorage(StorageWrapper):
    """`store`, of which each prefix takes `puts_s` writes and deletions and `gets_s` reads a second (None: any number).

    Each prefix has a bucket of tokens for either, which holds as many as `burst_s` seconds bring. A request that finds
    none is refused with StorageBusy, as S3 answers 503 SlowDown, and costs nothing. `prefix_of` says below which prefix
    a key lies. Listings go by the prefix that they list; a deletion of many counts once for each prefix.
    """

    def __init__(
        self,
        store: Storage,
        *,
        puts_s: float | None,
        gets_s: float | None,
        burst_s: float = 1.0,
        prefix_of: Callable[[str], str] = first_folders,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store)
        for name, rate in (("puts_s", puts_s), ("gets_s", gets_s)):
            if rate is not None:
                checks.positive(name, rate)
        checks.positive("burst_s", burst_s)
        self._rates = {"put": puts_s, "get": gets_s}
        self._burst_s = burst_s
        self._prefix_of = prefix_of
        self._clock = clock
        self._lock = threading.Lock()
        self._empty_s: dict[tuple[str, str], float] = {}  # when the bucket would have been empty, had it refilled since
        self._served: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    @property
    def served(self) -> Mapping[str, int]:
        """The requests that were let through, by prefix."""
        with self._lock:
            return dict(self._served)

    @property
    def refused(self) -> Mapping[str, int]:
        """The requests that were refused, by prefix; those without any are left out."""
        with self._lock:
            return dict(self._refused)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        self._take("put", key)
        super().put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing."""
        self._take("get", key)
        return super().get(key, start=start, stop=stop, gate=gate)

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        self._take("put", key)
        super().delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; missing keys are not an error."""
        for key in {self._prefix_of(key): key for key in keys}.values():
            self._take("put", key)
        super().delete_many(keys)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""
        self._take("put", prefix)
        return super().list(prefix)

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, and their etags."""
        self._take("put", prefix)
        return super().etags(prefix)

    def touch(self, key: str) -> None:
        """Make an object as young as one that is written now; raises KeyMissing."""
        self._take("put", key)
        super().touch(key)

    def _take(self, kind: str, key: str) -> None:
        """Take a token of the bucket of a key; raises StorageBusy where there is none."""
        prefix, rate = self._prefix_of(key), self._rates[kind]
        with self._lock:
            if rate is not None:
                now_s = self._clock()
                tokens = rate * (now_s - self._empty_s.get((prefix, kind), -self._burst_s + now_s))
                left = min(tokens, rate * self._burst_s) - 1
                if left < -1e-9:
                    self._refused[prefix] += 1
                    raise StorageBusy(f"{kind} {key}: SlowDown, {rate:g} a second below {prefix} and no more")
                self._empty_s[prefix, kind] = now_s - left / rate
            self._served[prefix] += 1
