"""Functions as threads that can be killed, put to sleep, started twice or not at all, on a storage that fails."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from funcpipe.core import Invocation, Plan, PlatformSpec, WorkerSpec, from_text, to_text
from funcpipe.core.log_lines import RawLine
from funcpipe.errors import FuncPipeError, KeyMissing, PlatformError, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Cause, Gate, Handle, Platform, State, Status, Storage
from funcpipe.platforms.wrappers import Counted, Retried
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.loop import live


class Fault(Enum):
    """What befalls a run."""

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


STORAGE_FAULTS = frozenset({Fault.BUSY, Fault.TRUNCATED, Fault.FLIPPED, Fault.STALE, Fault.SLOW})


class Died(StorageError):
    """The function is dead: nothing that it does has any effect."""


@dataclass
class Fate:
    """What befalls one function, by the number of its storage requests."""

    dies_at: int | None = None
    sleeps_at: int | None = None
    sleeps_s: float = 0.0
    full_from: int | None = None
    requests: int = 0
    dead: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    awake: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.awake.set()

    def next(self) -> int:
        """Count a request, and suffer what is due with it."""
        with self.lock:
            self.requests += 1
            number = self.requests
            if number == self.sleeps_at:
                self.awake.clear()
                threading.Timer(self.sleeps_s, self.awake.set).start()
        self.awake.wait()
        if number == self.dies_at:
            self.dead.set()
        if self.dead.is_set():
            raise Died("the function was killed")
        return number


class Doomed:
    """The storage as one function sees it, with its fate; every thread of it stands still while it sleeps."""

    def __init__(self, store: Storage, fate: Fate) -> None:
        self._store = store
        self._fate = fate
        self.watches = store.watches

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """As the wrapped storage, while the function lives and the disk has room."""
        number = self._fate.next()
        full = self._fate.full_from
        if full is not None and full <= number < full + 10:
            raise StorageError(f"the object {key!r} cannot be written: No space left on device")
        self._store.put(key, data, if_absent=if_absent, gate=gate)
        self._fate.awake.wait()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """As the wrapped storage, while the function lives."""
        self._fate.next()
        return self._store.get(key, start=start, stop=stop, gate=gate)

    def delete(self, key: str) -> None:
        """As the wrapped storage, while the function lives."""
        self._fate.next()
        self._store.delete(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """As the wrapped storage, while the function lives."""
        self._fate.next()
        return self._store.list(prefix)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """As the wrapped storage; the dead do not wait."""
        self._store.wait(key, min(timeout_s, 0.2), cancel)
        if self._fate.dead.is_set():
            raise Died("the function was killed")


class Faulty:
    """A storage of which a share of the requests goes wrong in one way, by `seed`."""

    def __init__(self, store: MemoryStorage, fault: Fault, seed: int, *, share: float = 0.05) -> None:
        self._store = store
        self._fault = fault
        self._draw = random.Random(seed)
        self._share = share
        self._lock = threading.Lock()
        self.watches = store.watches

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Sometimes fails before, sometimes after it had its effect."""
        wrong = self._goes_wrong()
        if wrong and self._fault is Fault.BUSY and self._drawn() < 0.5:
            raise StorageBusy("503 Slow Down")
        self._pause(wrong)
        self._store.put(key, data, if_absent=if_absent, gate=gate)
        if wrong and self._fault is Fault.BUSY:
            raise StorageBusy("the connection was lost")

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Sometimes fails, does not find what is there, or brings what was not written."""
        wrong = self._goes_wrong()
        if wrong and self._fault is Fault.BUSY:
            raise StorageBusy("500 Internal Error")
        if wrong and self._fault is Fault.STALE:
            raise KeyMissing(key)
        self._pause(wrong)
        data = self._store.get(key, start=start, stop=stop, gate=gate)
        if wrong and data and self._fault is Fault.TRUNCATED:
            return data[: int(len(data) * self._drawn())]
        if wrong and data and self._fault is Fault.FLIPPED:
            changed = bytearray(data)
            changed[int(len(data) * self._drawn())] ^= 1 << int(8 * self._drawn())
            return bytes(changed)
        return data

    def delete(self, key: str) -> None:
        """Sometimes fails."""
        if self._goes_wrong() and self._fault is Fault.BUSY:
            raise StorageBusy("time-out")
        self._store.delete(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Sometimes fails."""
        if self._goes_wrong() and self._fault is Fault.BUSY:
            raise StorageBusy("time-out")
        return self._store.list(prefix)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """As the wrapped storage."""
        self._store.wait(key, timeout_s, cancel)

    def _goes_wrong(self) -> bool:
        return self._drawn() < self._share

    def _drawn(self) -> float:
        with self._lock:
            return self._draw.random()

    def _pause(self, wrong: bool) -> None:
        if self._fault is Fault.SLOW:
            time.sleep(0.1 if wrong else 0.002)


@dataclass
class _Function:
    thread: threading.Thread | None
    fate: Fate
    clock: Callable[[], float]
    ended_well: bool | None = None


class Threads:
    """A platform whose functions are threads of this process. `fate_of` draws what befalls the nth invocation.

    `lost` and `doubled` are the numbers of invocations that start nothing, or two functions.
    """

    url = "threads://here"

    def __init__(
        self,
        spec: PlatformSpec,
        storage: Storage,
        *,
        fate_of: Callable[[int], Fate],
        lost: frozenset[int] = frozenset(),
        doubled: frozenset[int] = frozenset(),
        clock_of: Callable[[int], Callable[[], float]] = lambda number: time.time,
    ) -> None:
        self.spec = spec
        self._clock_of = clock_of
        self._storage = storage
        self._fate_of = fate_of
        self._lost = lost
        self._doubled = doubled
        self._numbers = itertools.count()
        self._functions: dict[str, _Function] = {}

    def check(self, plan: Plan) -> None:
        """Threads run any plan."""

    def open(self, url: str) -> Platform:
        """This platform, by its URL."""
        if url != self.url:
            raise PlatformError(f"there is no platform {url}")
        return self

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once."""
        assert isinstance(worker, WorkerSpec), "these functions only train"
        number = next(self._numbers)
        if number in self._doubled:
            self._start(worker, _Function(None, Fate(), self._clock_of(number)), f"function {number} again")
        function = _Function(None, self._fate_of(number), self._clock_of(number))
        return self._start(worker, function, f"function {number}", lost=number in self._lost)

    def status(self, handle: Handle) -> Status:
        """How the function fares: one that was lost seems to run."""
        function = self._functions[handle.name]
        if function.thread is None or (function.thread.is_alive() and not function.fate.dead.is_set()):
            return Status(state=State.RUNNING)
        if function.ended_well:
            return Status(state=State.DONE)
        return Status(state=State.FAILED, reason="killed by SIGKILL", cause=Cause.CRASHED)

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended."""
        function = self._functions[handle.name]
        function.fate.dead.set()
        function.fate.awake.set()
        if function.thread is not None:
            function.thread.join(timeout=60)
            if function.thread.is_alive():
                raise PlatformError(f"{handle.name} hangs")

    def logs(self, run: str) -> tuple[RawLine, ...]:
        """Nothing is kept of threads."""
        return ()

    def detach(self) -> None:
        """Nothing: functions are threads of their client."""

    def stop_all(self) -> None:
        """End all functions, at once, as the end of their machine would."""
        for function in self._functions.values():
            function.fate.dead.set()
            function.fate.awake.set()
        for name in list(self._functions):
            self.stop(Handle(worker="", name=name))

    def _start(self, worker: WorkerSpec, function: _Function, name: str, *, lost: bool = False) -> Handle:
        spec = from_text(WorkerSpec, to_text(worker), source="the invocation payload")
        self._functions[name] = function
        if not lost:
            function.thread = threading.Thread(target=self._run, args=(spec, function), name=name, daemon=True)
            function.thread.start()
        return Handle(worker=spec.worker, name=name)

    def _run(self, spec: WorkerSpec, function: _Function) -> None:
        try:
            storage = Counted(Retried(Doomed(self._storage, function.fate)))
            function.ended_well = live(spec, storage, self.open, clock=function.clock)
        except FuncPipeError:
            function.ended_well = False  # it could not even say so
