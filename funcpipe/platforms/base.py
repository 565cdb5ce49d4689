"""The two Protocols that a cloud must satisfy: object storage, and a platform that runs functions."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from funcpipe.core import CountsByKind, Invocation, Plan, PlatformSpec, RequestCounts
from funcpipe.core.logs import RawLine
from funcpipe.core.provisioned import Provisioned
from funcpipe.core.start import Readiness, StartPart, StartTimes
from funcpipe.core.stores import DEFAULT
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.process import PeakMemory

Gate = AbstractContextManager[object]
OPEN: Gate = nullcontext()
"""The gate that is always open. A gate is held exactly while the body of an object moves."""

SHARE = "provisioned"
"""The option in the URL of a platform whose functions are kept ready: what they cost, as a share of their price."""

DELETE_BATCH = 1000
"""The most objects that one request deletes, as in S3 and OSS."""


class Storage(Protocol):
    """Whole objects by key. `put` is atomic: a reader sees all of an object or none of it.

    Every method may be called from several threads at once. `gate` is entered when the request's latency is over and
    left when its body has moved, so that requests can wait side by side while bodies pass one at a time; a request that
    is tried again enters it again. `watches` is True if `wait` ends as soon as the object comes.
    """

    watches: bool

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object, to its end if `stop` is None or beyond it; raises KeyMissing.

        A negative `start`, without `stop`, stands for the last bytes, or all if there are fewer.
        """

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove any number of objects, in as few requests as can be; missing keys are not an error.

        If some cannot be removed, the others still are, and the error names one of them with its reason.
        """

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, each with a text that changes when other bytes are put there.

        It takes as many requests as `list`.
        """

    def touch(self, key: str) -> None:
        """Make an object as young as one that is written now, where some are deleted by their age; raises KeyMissing.

        It stays as it is. One that others write or remove at the same time may come out as it was before.
        """

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause, without a request: until `timeout_s` are over, `cancel` is set or, if `watches`, the object is there.

        It may end early: the caller asks again.
        """


def batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Return `keys` in parts of at most DELETE_BATCH."""
    return (keys[start : start + DELETE_BATCH] for start in range(0, len(keys), DELETE_BATCH))


class RequestMeter:
    """Several storages may count with one meter, and several threads at once: all that a function or a client asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CountsByKind().by_kind

    @property
    def by_kind(self) -> CountsByKind:
        """The counts so far, by the kind of objects."""
        with self._lock:
            return CountsByKind(**self._counts)

    @property
    def counts(self) -> RequestCounts:
        """The counts so far."""
        return self.by_kind.total

    def add(self, counts: RequestCounts, kind: str = DEFAULT) -> None:
        """Count what was asked of the store of objects of that kind."""
        with self._lock:
            self._counts[kind] += counts


class OpenStorage(Protocol):
    """Opens the storage at a URL, such as `catalog.open_storage`."""

    def __call__(
        self,
        url: str,
        *,
        retry_s: float = ...,
        first_s: float | None = ...,
        meter: RequestMeter | None = ...,
        crowd_s: float | None = ...,
    ) -> Storage:
        """Return the storage at `url`; a request that fails for now is tried again for `retry_s`, and for `first_s`
        until the storage has answered once, unless that is None; later and later, but with regard to the time
        `crowd_s` in which all who ask at once can be served. `meter` counts them all.
        """


class StartClock:
    """Measures the parts of a function's start, which began in an environment of some `readiness`."""

    def __init__(
        self,
        readiness: Readiness = Readiness.COLD,
        parts: Mapping[StartPart, float] | None = None,
        *,
        ready: Callable[[StartTimes], object] | None = None,
    ) -> None:
        """`parts` are over already. `ready` is called when the function is ready for its first step."""
        self.readiness = readiness
        self._seconds = dict(parts or {})
        self._ready = ready
        self._first_step_s: float | None = None

    @contextmanager
    def part(self, part: StartPart) -> Iterator[None]:
        """Measure what is done within this context as `part`."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.add(part, time.monotonic() - began_s)

    def add(self, part: StartPart, seconds: float) -> None:
        """Count so many seconds as `part`."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def end(self, billed_s: float) -> None:
        """The function is ready for its first step, `billed_s` after it began: what is not known is the set-up."""
        known_s = sum(seconds for part, seconds in self._seconds.items() if part is not StartPart.ENVIRONMENT)
        self._seconds[StartPart.SETUP] = max(billed_s - known_s, 0.0)
        if self._ready is not None:
            self._ready(self.times)

    def step_ended(self, seconds: float) -> None:
        """Note the time of the first step; of later ones nothing."""
        if self._first_step_s is None:
            self._first_step_s = seconds

    @property
    def times(self) -> StartTimes:
        """What is known so far."""
        parts = {part.value: self._seconds[part] for part in StartPart if part in self._seconds}
        return StartTimes(readiness=self.readiness, parts=parts, first_step_s=self._first_step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoked:
    """The time at which a function was invoked: `at_s`, by its monotonic clock, before it has loaded anything.

    Its platform ends it `lifetime_s` later, where it says so, and bills it for `init_s` before it: the time to make its
    environment ready, of which it is the first invocation. `meter` counts the storage requests of the invocation,
    `memory` knows the most memory that it has used, and `start` what its start takes. `template` is what the process
    that it was forked from has loaded for it.
    """

    at_s: float = field(default_factory=time.monotonic)
    lifetime_s: float | None = None
    init_s: float = 0.0
    meter: RequestMeter = field(default_factory=RequestMeter)
    memory: PeakMemory = field(default_factory=PeakMemory)
    start: StartClock = field(default_factory=StartClock)
    template: object = None

    @property
    def billed_s(self) -> float:
        """The time for which it is billed so far."""
        return self.init_s + time.monotonic() - self.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A function that was started: its worker, and its identifier on the platform."""

    worker: str
    name: str


class State(Enum):
    """The state of a function."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Cause(Enum):
    """The cause of a function's failure, where the platform knows it. `EXITED`: its process ended itself."""

    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a function and, if it failed, why: in words that name signal or exit code, and as a cause.

    `peak_bytes` is the most memory that it used, where the platform knows.
    """

    state: State
    reason: str = ""
    cause: Cause | None = None
    peak_bytes: int | None = None


class Platform(Protocol):
    """Starts functions, reports their state, stops them.

    It can be opened by its URL in any process of its machine or account, in functions too; a handle is valid in all.
    """

    @property
    def spec(self) -> PlatformSpec:
        """The specification of the platform."""

    @property
    def url(self) -> str:
        """The URL by which `catalog.open_platform` opens it again."""

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Raise InputError if `plan` cannot be run, as far as that can be known before anything is paid for.

        `run_s` is the expected time of the run, if that is known: it decides if functions will hand over, for which
        they need room beside them.
        """

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once. Raises PlatformBusy if it may be started later, or PlatformRefused."""

    def status(self, handle: Handle) -> Status:
        """Return the function's state. Several threads may ask at once."""

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended."""

    def detach(self) -> None:
        """Let the functions, and those that they start, run on when this client ends."""

    def wrap_key(self, run_key: str) -> str:
        """Return the text of a run's key, wrapped so that only the platform's own functions can read it.

        It lies in storage for the watchdog of detached runs; empty where the platform gives its watchdog the key.
        """

    def unwrap_key(self, wrapped: str) -> str:
        """Return the inverse of `wrap_key`, in a function. Raises PlatformRefused for what was wrapped elsewhere."""

    def logs(self, run: str) -> Iterable[RawLine]:
        """Return the lines that the functions of `run` logged and printed, and the platform's own notes about them.

        The lines of one function come in order; `core.logs.merged` does the rest. Lines of other runs may be among
        them. A run that the platform does not know, or no longer knows, has none.
        """


class PlainKeys:
    """Keys of runs on platforms that give them to their functions, and to their watchdog, in the clear."""

    def wrap_key(self, run_key: str) -> str:
        """Return nothing: a mark in storage holds no key."""
        return ""

    def unwrap_key(self, wrapped: str) -> str:
        """Raise PlatformRefused: nothing is wrapped here."""
        raise PlatformRefused("keys of runs are not wrapped on this platform")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUrls:
    """The URLs of runs' objects on a deployment, for clients and for functions."""

    client: str
    functions: str


class Deployment(Platform, Protocol):
    """A platform in a cloud, with storage beside it."""

    @property
    def storage_urls(self) -> StorageUrls:
        """The storage that belongs to it."""

    def of_deployed_sizes(self) -> "Deployment":
        """The same platform with only those sizes that have a function; raises PlatformRefused if there are none."""


@runtime_checkable
class ProvisioningPlatform(Platform, Protocol):
    """A platform that may keep the functions of a run ready, at the price that its specification has for them."""

    def provision(self, plan: Plan, run: str, wanted: Provisioned) -> Platform:
        """Return the same platform, whose functions for `plan` are ready as `wanted`, until `release` at the latest.

        Raises InputError, PlatformError or DeadlineExceeded, and keeps none ready, where that cannot be.
        """

    def release(self, plan: Plan, run: str) -> None:
        """Keep no function of `plan` ready any more that was for `run`."""


OpenPlatform = Callable[[str], Platform]
"""Opens the platform that a URL names."""
