"""Messages of a run: tensors that are put under a key, and waited for under that key."""

import itertools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.comm.arrival_estimator import ArrivalEstimator, Due, Expectation
from funcpipe.comm.buffer_pool import BufferPool
from funcpipe.comm.signature import Signature
from funcpipe.comm.transfer_gate import TransferGate
from funcpipe.core import Wire
from funcpipe.core.run_key import RunKey
from funcpipe.errors import Cancelled, CorruptMessage, DeadlineExceeded, KeyExists, KeyMissing
from funcpipe.platforms.base import Storage

_log = logging.getLogger(__name__)

_READS = 3
"""The reads of a message before its bytes count as damaged in the storage itself."""

_SLOW_S = 5.0
"""A message is slow when it comes so much later than expected, and takes more than twice as long as expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message or a series of them, its size, and how long the reader waited for it to exist."""

    messages: tuple[dict[str, Tensor], ...]
    payload_bytes: int
    waited_s: float

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The only message."""
        (message,) = self.messages
        return message


class Channel:
    """Sends and receives messages through `storage`, signed with `run_key`. Setting `cancel` ends every wait.

    Several threads may use it at once: their requests are open side by side, but in each direction one body moves at a
    time. The bodies of series, which synchronise replicas, let messages go ahead, because other stages wait for those.

    Messages of the same name, the last part of their key, come once a step. Where the storage does not notify when an
    object appears, `estimator` expects it when it came in the last steps.

    `started` names the functions that the run has started so far, and whatever else others may have to wait for.
    Whenever there are new ones, as after a restart, all deadlines count afresh, because what they do again is late for
    everybody.
    """

    def __init__(
        self,
        storage: Storage,
        estimator: ArrivalEstimator,
        *,
        run_key: RunKey,
        cancel: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        started: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._storage = storage
        self._estimator = estimator
        self._run_key = run_key
        self._cancel = cancel
        self._clock = clock
        self._uploading, self._downloading = TransferGate(), TransferGate()
        self._buffers = BufferPool()
        self._step_s = clock()
        self._steps = 0
        self._expected: dict[str, Expectation] = defaultdict(lambda: Expectation(estimator))
        self._written: Collection[str] = ()
        self._started = started
        self._known, self._restarted_s = frozenset(started()), -math.inf

    def adopt(self, written: Collection[str]) -> None:
        """Leave the messages with the keys `written` as they are: earlier attempts have put them, and others may have
        read them.
        """
        self._written = written

    def has_written(self, key: str) -> bool:
        """Return True if an earlier attempt has put the message."""
        return key in self._written

    def begin_step(self) -> None:
        """A step begins: the arrivals of its messages are counted from here.

        What the first step taught is forgotten, because everything is late while functions start.
        """
        self._step_s = self._clock()
        self._steps += 1
        if self._steps == 2:
            self._expected.clear()

    def put(self, key: str, tensors: Mapping[str, Tensor], *, wire: Wire = Wire.FP32) -> int:
        """Write a message, ahead of all series; returns its size. 32-bit floats travel in the format `wire`.

        A message never changes: one that an earlier attempt has put stays, and 0 is returned. Raises CorruptMessage if
        another attempt has put other bits under the key since; the next attempt will know of them.
        """
        return self._put(key, (tensors,), wire, ahead=True)

    def put_series(self, key: str, messages: Sequence[Mapping[str, Tensor]], *, wire: Wire = Wire.FP32) -> int:
        """Write messages as one object, one after another; returns its size."""
        return self._put(key, messages, wire, ahead=False)

    def get(
        self, key: str, *, start: int = 0, stop: int | None = None, into: Mapping[str, Tensor] | None = None
    ) -> Received:
        """Wait for the object and decode the message in its bytes [start, stop), into the tensors that `into` names.

        Raises DeadlineExceeded, Cancelled or CorruptMessage, each with the key.
        """
        return self._read_whole(key, start, stop, lambda message: (self._decoded(key, message, start, into),))

    def get_series(
        self,
        key: str,
        sizes: Sequence[int],
        into: Sequence[Mapping[str, Tensor]],
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> Received:
        """Wait for an object that was put as a series; decode its messages of so many bytes in [start, stop), each into
        the tensors that `into` names for it.
        """
        borders = list(itertools.accumulate(sizes[:-1]))

        def decode(body: bytes) -> tuple[dict[str, Tensor], ...]:
            cuts = itertools.pairwise((0, *borders, len(body)))  # so that what is too much is in the last message
            return tuple(
                self._decoded(key, memoryview(body)[first:end], start + first, tensors)
                for (first, end), tensors in zip(cuts, into, strict=True)
            )

        return self._read_whole(key, start, stop, decode)

    def _put(self, key: str, messages: Sequence[Mapping[str, Tensor]], wire: Wire, *, ahead: bool) -> int:
        if self.has_written(key):
            return 0
        size, proof = sum(codec.message_bytes(tensors, wire) for tensors in messages), Signature(self._run_key, key)
        with self._uploading.reserve(ahead=ahead) as gate, self._buffers.lend(size) as buffer:
            body = codec.encode_series(messages, wire, buffer=buffer, proof=proof)
            try:
                self._storage.put(key, body, if_absent=True, gate=gate)
            except KeyExists:
                if not codec.is_same(body, self._storage.get(key), messages, wire, proof=proof):
                    raise CorruptMessage(f"another attempt of this worker has put {key} with other bits") from None
        return size

    def _read_whole(
        self, key: str, start: int, stop: int | None, decode: Callable[[bytes], tuple[dict[str, Tensor], ...]]
    ) -> Received:
        """Read and decode; a message that was damaged on its way is read again."""
        for _ in range(_READS - 1):
            message, waited_s = self._read(key, start, stop)
            try:
                return Received(messages=decode(message), payload_bytes=len(message), waited_s=waited_s)
            except CorruptMessage as error:
                _log.warning("reading again what arrived damaged: %s", error)
        message, waited_s = self._read(key, start, stop)
        return Received(messages=decode(message), payload_bytes=len(message), waited_s=waited_s)

    def _read(self, key: str, start: int, stop: int | None) -> tuple[bytes, float]:
        expected = self._expected[key.rsplit("/", 1)[-1]]
        gate = self._downloading.ticket()
        began_s = self._clock()
        starts_s = (self._step_s, began_s)
        due = expected.due(starts_s)
        paused = self._storage.watches or due.start_s + due.due_s > began_s
        if paused:
            self._wait(key, self._estimator.deadline_s, due)
        empty_s, trip_s = None, 0.0
        while True:
            asked_s = self._clock()
            try:
                message = self._storage.get(key, start=start, stop=stop, gate=gate)
            except KeyMissing:
                empty_s, trip_s = asked_s, self._clock() - asked_s
                self._pause(key, began_s, due, trip_s)
                continue
            if paused or empty_s is not None:
                expected.learn(starts_s, asked_s if self._storage.watches else empty_s, asked_s, trip_s)
            _log_if_slow(key, asked_s, began_s, due)
            return message, asked_s - began_s

    def _pause(self, key: str, began_s: float, due: Due, trip_s: float = 0.0) -> None:
        now_s = self._clock()
        left_s = self._left_s(began_s, now_s)
        if left_s <= 0:
            self._check_restarts(now_s)
            left_s = self._left_s(began_s, now_s)
        if left_s <= 0:
            raise DeadlineExceeded(f"{key} has not come within {self._estimator.deadline_s:g} s")
        self._wait(key, left_s, due, trip_s)

    def _wait(self, key: str, left_s: float, due: Due, trip_s: float = 0.0) -> None:
        """Wait for the next request, for `left_s` at most, or until the storage tells that the object is there."""
        learned_s = self._estimator.pause_s(self._clock() - due.start_s, due.due_s, due.spread_s, trip_s)
        self._storage.wait(key, left_s if self._storage.watches else min(learned_s, left_s), self._cancel)
        if self._cancel.is_set():
            raise Cancelled(f"stopped waiting for {key}")

    def _left_s(self, began_s: float, now_s: float) -> float:
        return self._estimator.deadline_s - (now_s - max(began_s, self._restarted_s))

    def _check_restarts(self, now_s: float) -> None:
        """Note what `started` has new names of; at the end of a deadline only, as it costs a listing."""
        started = frozenset(self._started())
        if started - self._known:
            _log.info("deadlines count afresh, as these are new: %s", sorted(started - self._known))
            self._restarted_s = now_s
        self._known = started

    def _decoded(
        self, key: str, message: bytes | memoryview, offset: int, into: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        try:
            return codec.decode(message, into=into, proof=Signature(self._run_key, key), offset=offset)
        except CorruptMessage as error:
            raise CorruptMessage(f"{key}: {error}") from error


def _log_if_slow(key: str, came_s: float, began_s: float, due: Due) -> None:
    """Log a message that came far later than `due`, as far as the reader had to wait for it."""
    expected_s = max(due.start_s + due.due_s + due.spread_s - began_s, 0.0)
    waited_s = came_s - began_s
    if waited_s - expected_s <= max(_SLOW_S, expected_s):
        return
    if due.due_s + due.spread_s:
        _log.warning("%s was slow: waited %.1f s for it, expected %.1f s", key, waited_s, expected_s)
    else:
        _log.info("%s was slow: waited %.1f s for it, with nothing known of when it comes", key, waited_s)
