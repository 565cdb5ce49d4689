"""Storage for runs that must end after a step, however late their functions hear of the order to end."""

import threading
from collections import Counter

from funcpipe.platforms.base import OPEN, Gate
from funcpipe.testing.memory_storage import MemoryStorage
from tests.support.census import below_generation
from tests.support.waiting import LONG_S


class Halting(MemoryStorage):
    """Storage that lets no message of the fifth step pass before all workers know of the order to end after it."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._beats = Counter[str]()
        self._workers, self._ordered = workers, False
        self._heard = threading.Condition()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        kind, worker, *rest = [*below_generation(key), "", ""]
        with self._heard:
            if kind == "messages" and int(rest[0]) >= 4:
                assert self._heard.wait_for(self._all_have_heard, timeout=LONG_S)
        super().put(key, data, if_absent=if_absent, gate=gate)
        with self._heard:
            if kind == "heartbeats" and rest[0] and self._ordered:  # others are the client's
                self._beats[worker] += 1
                self._heard.notify_all()

    def order(self) -> None:
        """From now on it is known what workers have heard of: they look before each heartbeat."""
        with self._heard:
            self._ordered = True

    def _all_have_heard(self) -> bool:
        return len(self._beats) == self._workers and min(self._beats.values()) >= 2
