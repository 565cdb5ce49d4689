"""A link of limited speed and latency in front of any storage: what a function sees of a cloud, on one machine.

A `Pace` is a token bucket in one number: the time at which all bytes admitted so far will have passed. Capacity
that was not used is kept for `BURST_S` and lost after that.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from funcpipe.core import FunctionSize, PlatformSpec, checks
from funcpipe.core.stores import DEFAULT, storage_of, urls_by_kind
from funcpipe.errors import InvalidValue, KeyMissing
from funcpipe.platforms.base import OPEN, Gate, Storage, batches
from funcpipe.platforms.wrappers import Answer, StorageWrapper

BURST_S = 0.005
_TURN_S = 0.005  # bodies that share a link pass in turns that each take so long


class Pace(Protocol):
    """The pace at which bytes pass in one direction."""

    bytes_s: float

    def due_s(self, size: int, since_s: float) -> float:
        """Admit `size` bytes that were ready at `since_s`; when, on the monotonic clock, they will have passed."""


class OwnPace:
    """The pace of a link that the threads of this process share."""

    def __init__(self, bytes_s: float) -> None:
        checks.positive("bytes_s", bytes_s)
        self.bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def due_s(self, size: int, since_s: float) -> float:
        """Admit `size` bytes that were ready at `since_s`; when they will have passed."""
        with self._lock:
            self._free_s = _next_free_s(self._free_s, since_s, size / self.bytes_s)
            return self._free_s


class SharedPace:
    """The pace of a link that processes share: its state is the file `path`, which all of them name."""

    _STATE = struct.Struct("<d")

    def __init__(self, bytes_s: float, path: str | Path) -> None:
        checks.positive("bytes_s", bytes_s)
        self.bytes_s = bytes_s
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._STATE.size)
        self._state = mmap.mmap(self._file, self._STATE.size)

    def due_s(self, size: int, since_s: float) -> float:
        """Admit `size` bytes that were ready at `since_s`; when they will have passed."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                (free_s,) = self._STATE.unpack_from(self._state)
                free_s = _next_free_s(free_s, since_s, size / self.bytes_s)
                self._STATE.pack_into(self._state, 0, free_s)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            return float(free_s)


class Throttled(StorageWrapper):
    """Imposes `latency_s` on every request, and on bodies the slowest of the paces of their direction.

    It stands for a storage that is far away, which does not notify of new objects. As there, an object that is
    missing when a get begins stays missing for that get, and one that is put can be read when its last byte has passed.
    """

    def __init__(
        self,
        store: Storage,
        *,
        latency_s: float = 0.0,
        upload: Sequence[Pace] = (),
        download: Sequence[Pace] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        checks.at_least("latency_s", latency_s, 0)
        super().__init__(store)
        self.watches = False
        self._latency_s = latency_s
        self._upload = tuple(upload)
        self._download = tuple(download)
        self._clock = clock
        self._sleep = sleep

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object, as fast as the link admits."""
        opening = _Opening(self, gate, self._clock() + self._latency_s)
        size = memoryview(data).nbytes
        self._store.put(key, data, if_absent=if_absent, gate=_Passing(self, opening, size, self._upload))

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object, as fast as the link admits."""
        arrives_s = self._clock() + self._latency_s
        with ExitStack() as left_last:
            opening = _Opening(self, gate, arrives_s, left_last)
            try:
                data = self._store.get(key, start=start, stop=stop, gate=opening)
            except KeyMissing:
                self.sleep_until(arrives_s)
                raise
            self.pass_bytes(len(data), self._download, opening.entered_s)
        return data

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, after the latency of each batch."""
        for batch in batches(keys):
            super().delete_many(batch)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause for `timeout_s`, or until `cancel` is set."""
        cancel.wait(timeout_s)

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        """Make a request that has no body, after the latency."""
        self._sleep(self._latency_s)
        return request()

    def now_s(self) -> float:
        """Return the time on this storage's clock."""
        return self._clock()

    def sleep_until(self, due_s: float) -> None:
        """Return at `due_s`, or now if that is past."""
        left_s = due_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def pass_bytes(self, size: int, paces: Sequence[Pace], since_s: float) -> None:
        """Return when `size` bytes that were ready at `since_s` have passed, in turns with those of other bodies."""
        if not paces:
            return
        turn = max(1, int(min(pace.bytes_s for pace in paces) * _TURN_S))
        due_s = since_s
        for passed in range(0, size, turn):
            due_s = max(pace.due_s(min(turn, size - passed), due_s) for pace in paces)
            self.sleep_until(due_s)


class _Opening:
    """A gate that opens when the latency is over. With `left_last`, the gate behind it is left with that stack."""

    def __init__(self, link: Throttled, gate: Gate, arrives_s: float, left_last: ExitStack | None = None) -> None:
        self._link = link
        self._gate = gate
        self._arrives_s = arrives_s
        self._left_last = left_last
        self.entered_s = arrives_s

    def __enter__(self) -> None:
        self._link.sleep_until(self._arrives_s)
        if self._left_last is None:
            self._gate.__enter__()
        else:
            self._left_last.close()  # an attempt before this one may have left it open
            self._left_last.enter_context(self._gate)
        self.entered_s = self._link.now_s()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left_last is None:
            self._gate.__exit__(kind, error, trace)


class _Passing:
    """A gate that is left when `size` bytes have passed."""

    def __init__(self, link: Throttled, opening: _Opening, size: int, paces: Sequence[Pace]) -> None:
        self._link = link
        self._opening = opening
        self._size = size
        self._paces = paces

    def __enter__(self) -> None:
        self._opening.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._link.pass_bytes(self._size, self._paces, self._opening.entered_s)
        finally:
            self._opening.__exit__(kind, error, trace)


def _next_free_s(free_s: float, since_s: float, takes_s: float) -> float:
    return max(free_s, since_s - BURST_S) + takes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between one function and the storage: latency, bytes per second each way, and the cap functions share.

    It is the fragment of the storage's URL, and imposed wherever that is opened:
    `file:///tmp/objects#latency_s=0.04&upload_bytes_s=7e7&download_bytes_s=7e7`; with `shared_bytes_s` and `shared`, a
    folder that all functions know, they have that much in each direction together.
    """

    latency_s: float
    upload_bytes_s: float
    download_bytes_s: float
    shared_bytes_s: float | None = None
    shared: str | None = None

    def __post_init__(self) -> None:
        if (self.shared_bytes_s is None) != (self.shared is None):
            raise InvalidValue("shared", self.shared, "must be given together with shared_bytes_s")

    def impose(self, store: Storage) -> Storage:
        """Return `store` as it is seen through this link."""
        return Throttled(
            store,
            latency_s=self.latency_s,
            upload=self._paces(self.upload_bytes_s, "upload"),
            download=self._paces(self.download_bytes_s, "download"),
        )

    def on(self, url: str) -> str:
        """Return the URL of a storage, or those of several, which may have another link already, with this one."""
        words = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        linked = {
            kind: urlsplit(one)._replace(fragment=urlencode(words)).geturl() for kind, one in urls_by_kind(url).items()
        }
        return linked[DEFAULT] if len(linked) == 1 else storage_of(linked)

    def _paces(self, bytes_s: float, direction: str) -> list[Pace]:
        paces: list[Pace] = [OwnPace(bytes_s)]
        if self.shared_bytes_s is not None and self.shared is not None:
            paces.append(SharedPace(self.shared_bytes_s, os.path.join(self.shared, direction)))
        return paces


def link_of(spec: PlatformSpec, size: FunctionSize, folder: str) -> Link:
    """Return the link of functions of `size`; those of one `folder` share the platform's cap."""
    return Link(
        latency_s=spec.latency_s,
        upload_bytes_s=size.upload_bytes_s,
        download_bytes_s=size.download_bytes_s,
        shared_bytes_s=spec.shared_bytes_s,
        shared=None if spec.shared_bytes_s is None else folder,
    )


def read_link(fragment: str) -> Link:
    """Return the link that the fragment of a URL describes; raises InvalidValue."""
    words = dict(parse_qsl(fragment, keep_blank_values=True))
    shared = words.pop("shared", None)
    try:
        return Link(**{name: float(text) for name, text in words.items()}, shared=shared)
    except (TypeError, ValueError):
        rule = "must read latency_s=…&upload_bytes_s=…&download_bytes_s=…"
        raise InvalidValue("link", fragment, rule) from None
