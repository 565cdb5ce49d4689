"""Faults for tests of whole runs: storage that fails, and functions that are killed or put to sleep.

`ThreadPlatform` runs functions to which they happen; `tests.support.chaos` trains a small job under one of them.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from funcpipe.errors import StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import Answer, StorageWrapper
from funcpipe.testing.faulty_storage import StorageFaults


class Fault(Enum):
    """What goes wrong in a run."""

    NONE = "none"
    KILL = "SIGKILL"
    SLEEP = "SIGSTOP past the lease, SIGCONT"
    TWICE = "invoked twice"
    LOST = "invocation lost"
    BUSY = "time-outs, 500, 503"
    TRUNCATED = "truncated bodies"
    FLIPPED = "flipped bits"
    STALE = "stale reads"
    SLOW = "slow link"
    FULL = "disk full for a while"
    SKEW = "clocks minutes apart"
    CLIENT = "client killed, run resumed"
    ORPHAN = "client gone, a function SIGKILLed"
    ZOMBIE = "asleep for 1-3 message deadlines"
    SAVING = "SIGKILL while it saves"
    HANDING = "SIGKILL while it hands over"
    DAMAGED = "one object damaged, run resumed"
    OUTAGE = "no storage for a while"
    CLIENTS = "two clients at once"
    MIXED = "several of these at once"


STORAGE_FAULTS: Mapping[Fault, StorageFaults] = {
    Fault.BUSY: StorageFaults(refused=0.025, lost=0.025),
    Fault.TRUNCATED: StorageFaults(truncated=0.05),
    Fault.FLIPPED: StorageFaults(flipped=0.05),
    Fault.STALE: StorageFaults(missed=0.05),
    Fault.SLOW: StorageFaults(delayed=0.07, delay_s=0.1),
    Fault.ZOMBIE: StorageFaults(delayed=0.2, delay_s=0.1),
    Fault.HANDING: StorageFaults(delayed=0.1, delay_s=0.1),
    Fault.MIXED: StorageFaults(refused=0.01, lost=0.01, truncated=0.01, flipped=0.01, missed=0.01, delayed=0.03),
}
"""How often requests of all functions go wrong; zombies and hand-overs need runs that last, so links are slow."""


class ClientKilled(BaseException):
    """The client ends at once, as its machine does: it saves nothing, which one that is interrupted does."""


class FunctionKilled(StorageError):
    """The function was killed: nothing that it does has any effect."""


@dataclass
class FunctionFaults:
    """What goes wrong in one function, and at which of its storage requests (counted from 1).

    At request `killed_at` it dies, or before the nth object of which the key contains what `killed_writing` says; at
    `sleeps_at` all its threads stand still for `sleeps_s`; from `disk_full_from` on ten requests find the disk full.
    """

    killed_at: int | None = None
    killed_writing: tuple[str, int] | None = None
    sleeps_at: int | None = None
    sleeps_s: float = 0.0
    disk_full_from: int | None = None
    requests: int = 0
    dead: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    awake: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.awake.set()

    def next(self, written: str = "") -> int:
        """Count a request, which writes the key `written`, and let happen what is due at it. Raises FunctionKilled."""
        with self.lock:
            self.requests += 1
            if self.killed_writing is not None and self.killed_writing[0] in written:
                part, left = self.killed_writing
                self.killed_writing = part, left - 1
                if left == 1:
                    self.dead.set()
            number = self.requests
            if number == self.sleeps_at:
                self.awake.clear()
                threading.Timer(self.sleeps_s, self.awake.set).start()
        self.awake.wait()
        if number == self.killed_at:
            self.dead.set()
        if self.dead.is_set():
            raise FunctionKilled("the function was killed")
        return number


class FunctionStorage(StorageWrapper):
    """The storage as one function sees it, in which `faults` happen; all its threads stand still while it sleeps."""

    def __init__(self, store: Storage, faults: FunctionFaults) -> None:
        super().__init__(store)
        self._faults = faults

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object, while the function lives and the disk has room."""
        number = self._faults.next(key)
        full = self._faults.disk_full_from
        if full is not None and full <= number < full + 10:
            raise StorageBusy(f"the object {key!r} cannot be written: No space left on device")
        self._store.put(key, data, if_absent=if_absent, gate=gate)
        self._faults.awake.wait()

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause, unless the function was killed."""
        self._store.wait(key, min(timeout_s, 0.2), cancel)
        if self._faults.dead.is_set():
            raise FunctionKilled("the function was killed")

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make a request that writes nothing, while the function lives."""
        self._faults.next()
        return request()


class Outage(StorageWrapper):
    """A storage that cannot be reached for `seconds` from the request `begins` on, counted over all."""

    def __init__(self, store: Storage, *, begins: int, seconds: float) -> None:
        super().__init__(store)
        self._left = begins
        self._seconds = seconds
        self._until_s = 0.0
        self._lock = threading.Lock()

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make a request, when the storage can be reached."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._until_s = time.monotonic() + self._seconds
            if time.monotonic() < self._until_s:
                raise StorageBusy("the storage cannot be reached: an outage on purpose")
        return request()


def damage(storage: Storage, run: str, draw: random.Random) -> None:
    """Flip a bit of one object of `run`, cut it off, or delete it."""
    keys = storage.list(f"{run}/")
    if not keys:
        return
    key = draw.choice(keys)
    data, how = bytearray(storage.get(key)), draw.choice(("flip", "cut", "delete"))
    if how == "delete" or not data:
        storage.delete(key)
    elif how == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        storage.put(key, bytes(data))
    else:
        storage.put(key, bytes(data[: draw.randrange(len(data))]))
