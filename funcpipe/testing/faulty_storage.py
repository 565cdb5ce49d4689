"""Storage that fails on purpose: what a network and a busy service do to requests, wrapped around any back-end."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from funcpipe.core import checks
from funcpipe.errors import InvalidValue, KeyMissing, StorageBusy
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import Answer, StorageWrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFaults:
    """Which share of the requests, from 0 to 1, suffers what.

    `refused`: nothing is done, and StorageBusy raised. `lost`: all is done, but the answer is lost, and StorageBusy
    raised. `missed`: a get does not find what is there, and raises KeyMissing. `truncated`: a get brings only the
    beginning. `flipped`: it brings bytes of which one bit is wrong. `delayed`: a request takes `delay_s` longer.
    """

    refused: float = 0.0
    lost: float = 0.0
    missed: float = 0.0
    truncated: float = 0.0
    flipped: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.1

    def __post_init__(self) -> None:
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidValue(name, getattr(self, name), "must be a share between 0 and 1")
        checks.at_least("delay_s", self.delay_s, 0)


SHARES = tuple(field.name for field in fields(StorageFaults) if field.name != "delay_s")
"""What can go wrong."""


class FaultyStorage(StorageWrapper):
    """`store`, of whose requests a share fails: the same ones for the same `seed`, if they come in the same order."""

    def __init__(
        self, store: Storage, faults: StorageFaults, *, seed: int = 0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(store)
        self._faults = faults
        self._sleep = sleep
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(SHARES, 0)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many requests have suffered what, so that a test can tell that anything has happened."""
        with self._lock:
            return dict(self._counts)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """The bytes [start, stop) of an object, unless that fails; they may be damaged."""
        data = super().get(key, start=start, stop=stop, gate=gate)
        if self._happens("missed"):
            raise KeyMissing(key)
        if data and self._happens("truncated"):
            data = data[: self._drawn(len(data))]
        if data and self._happens("flipped"):
            changed = bytearray(data)
            changed[self._drawn(len(data))] ^= 1 << self._drawn(8)
            data = bytes(changed)
        return data

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make a request, unless it fails."""
        if self._happens("refused"):
            raise StorageBusy(f"{what}: refused on purpose")
        if self._happens("delayed"):
            self._sleep(self._faults.delay_s)
        result = request()
        if self._happens("lost"):
            raise StorageBusy(f"{what}: the answer was lost on purpose")
        return result

    def _happens(self, name: str) -> bool:
        with self._lock:
            happens: bool = self._draw.random() < getattr(self._faults, name)
            self._counts[name] += happens
            return happens

    def _drawn(self, stop: int) -> int:
        with self._lock:
            return self._draw.randrange(stop)
