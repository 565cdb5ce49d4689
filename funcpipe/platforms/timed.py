"""A storage that times its answers, and warns once if it slows the run down."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import StorageWrapper

_log = logging.getLogger(__name__)

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
