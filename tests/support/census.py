"""Storage in memory that knows at any time how many objects of each kind lie there, and how many there were at most."""

import threading
from collections import Counter
from collections.abc import Sequence

from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate.keys import is_message
from funcpipe.testing.memory_storage import MemoryStorage


def below_generation(key: str) -> list[str]:
    """The parts of a key below its generation, or below its run if it is of no generation."""
    return (key.partition("/g0")[2] or key).split("/")[1:]


def kind_of(key: str) -> str:
    """What a run's object is: its folder in the run, and for a message also the worker that has put it."""
    parts = key.split("/")
    if len(parts) < 3:
        return key
    return "/".join(below_generation(key)[:2]) if is_message(key) else parts[2]


class Census(MemoryStorage):
    """Numbers of objects by kind: how many there are `now`, were at `most` at a time, and were `ever` put.

    `bytes_now` is the size of all, and `deletions` counts requests that delete.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self._sizes: dict[str, int] = {}
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.ever: Counter[str] = Counter()
        self.bytes_now = 0
        self.deletions = 0

    @property
    def objects(self) -> int:
        """How many objects there are."""
        return len(self._sizes)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """As in memory; counted."""
        super().put(key, data, if_absent=if_absent, gate=gate)
        with self._counting:
            size, kind = memoryview(data).nbytes, kind_of(key)
            self.now[kind] += key not in self._sizes
            self.ever[kind] += key not in self._sizes
            self.bytes_now += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            self.most[kind] = max(self.most[kind], self.now[kind])

    def delete(self, key: str) -> None:
        """As in memory; counted."""
        self.deletions += 1
        self._remove(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """As in memory; counted as one request."""
        self.deletions += 1
        for key in keys:
            self._remove(key)

    def _remove(self, key: str) -> None:
        super().delete(key)
        with self._counting:
            if key in self._sizes:
                self.bytes_now -= self._sizes.pop(key)
                self.now[kind_of(key)] -= 1
