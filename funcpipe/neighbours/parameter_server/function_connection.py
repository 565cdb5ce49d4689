"""Between a parameter server's client and its functions: messages through a storage, and the client's connections.

    run-1/g0000-3fa9/server/work/f0/0001/00000007      what attempt 1 of the worker f0 is to compute next, as JSON
    run-1/g0000-3fa9/server/pushes/f0/0001/00000007    what it has computed: JSON, then gradients as safetensors
    run-1/g0000-3fa9/server/parameters/00000041        the parameters after 41 updates, as safetensors

Each attempt has orders of its own, so that a function that was given up, but was only slow, does no harm. Message 0
says that a function is ready; each order is answered by the message of its number.
"""

import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from funcpipe.comm.arrival_estimator import ArrivalEstimator, Due, Expectation
from funcpipe.core import RequestCounts, ServerFunctionSpec, from_text, to_text
from funcpipe.errors import CorruptMessage, FormatError, KeyMissing
from funcpipe.neighbours.parameter_server.worker_group import Chunk
from funcpipe.platforms.base import Storage
from funcpipe.platforms.function_group import WatchedFunction
from funcpipe.runstate.checkpoints import deserialised, serialised
from funcpipe.runstate.documents import READS, encode_document
from funcpipe.runstate.keys import Keys

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder:
    """Compute `chunk` with the parameters after `version` updates; without a chunk, end."""

    FORMAT: ClassVar[str] = "funcpipe.server-work/1"

    number: int
    version: int = 0
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMessage:
    """The answer to the order `number`: the sums of the losses for each of its gradients, and the function's state.

    It took `pull_s` to get the parameters and `compute_s` to compute. It is billed for `billed_s` so far, has made
    `requests`, and leaves in `left_s`, as its lifetime ends; with `leaves` it does so now. `error` is why it failed;
    another function may do better if that is `retryable`.
    """

    FORMAT: ClassVar[str] = "funcpipe.server-push/1"

    number: int
    billed_s: float
    requests: RequestCounts
    left_s: float | None = None
    leaves: bool = False
    version: int = 0
    loss_sums: tuple[float, ...] = field(default=())
    pull_s: float = 0.0
    compute_s: float = 0.0
    error: str | None = None
    retryable: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys of all objects between a generation's parameter server and its functions; all are signed."""

    keys: Keys

    @property
    def root(self) -> str:
        """The prefix of the data's keys, for `data_key`."""
        return self.keys.prefix.rstrip("/")

    def order(self, spec: ServerFunctionSpec, number: int) -> str:
        """An order to the function of `spec`."""
        return f"{self.root}/server/work/{spec.worker}/{spec.attempt:04d}/{number:08d}"

    def message(self, spec: ServerFunctionSpec, number: int) -> str:
        """The answer of the function of `spec`."""
        return f"{self.root}/server/pushes/{spec.worker}/{spec.attempt:04d}/{number:08d}"

    def parameters(self, version: int) -> str:
        """The parameters after `version` updates."""
        return f"{self.root}/server/parameters/{version:08d}"


def packed(message: FunctionMessage, vectors: Sequence[Tensor] = ()) -> bytes:
    """A message and the gradients with it, as bytes."""
    head = to_text(message).encode()
    body = serialised({str(i): vector for i, vector in enumerate(vectors)}) if vectors else b""
    return _LENGTH.pack(len(head)) + head + body


def unpacked(data: bytes, *, source: str) -> tuple[FunctionMessage, tuple[Tensor, ...]]:
    """The inverse of `packed`. Raises CorruptMessage, which names `source`, for anything else."""
    if len(data) < _LENGTH.size:
        raise CorruptMessage(f"{source}: {len(data)} bytes are too few for a message")
    (length,) = _LENGTH.unpack_from(data)
    head, body = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
    try:
        message = from_text(FunctionMessage, head, source=source)
    except FormatError as error:
        raise CorruptMessage(str(error)) from error
    found: Mapping[str, Tensor] = deserialised(source, body) if body else {}
    if sorted(found) != sorted(str(i) for i in range(len(message.loss_sums))):
        raise CorruptMessage(f"{source}: {len(found)} gradients with {len(message.loss_sums)} losses")
    return message, tuple(found[str(i)] for i in range(len(found)))


class Arrivals:
    """A wait for each object. A `storage` that cannot watch is polled at the times by which earlier ones came.

    Setting `cancel` ends the wait, after one more read.
    """

    def __init__(
        self, storage: Storage, cancel: threading.Event, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage, self._cancel, self._clock = storage, cancel, clock
        self._estimator = ArrivalEstimator(deadline_s=float("inf"))
        self._expected = Expectation(self._estimator)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The object `key`, or None if it is not there after `timeout_s`.

        Raises CorruptMessage if it stays damaged when it is read again.
        """
        began_s = self._clock()
        starts_s = (began_s,)
        due = self._expected.due(starts_s)
        paused = not self._storage.watches and due.due_s > 0
        if paused:
            self._pause(key, began_s, timeout_s, due)
        empty_s, trip_s, damaged = None, 0.0, 0
        while True:
            asked_s = self._clock()
            is_last = self._cancel.is_set() or asked_s - began_s >= timeout_s
            try:
                data = self._storage.get(key)
            except KeyMissing:
                if is_last:
                    return None
                empty_s, trip_s = asked_s, self._clock() - asked_s
                self._pause(key, began_s, timeout_s, due, trip_s)
            except CorruptMessage:
                damaged += 1
                if damaged == READS:
                    raise
            else:
                if paused or empty_s is not None:
                    self._expected.learn(starts_s, empty_s, asked_s, trip_s)
                return data

    def _pause(self, key: str, began_s: float, timeout_s: float, due: Due, trip_s: float = 0.0) -> None:
        since_s = self._clock() - began_s
        left_s = max(timeout_s - since_s, 0.0)
        learned_s = self._estimator.pause_s(since_s, due.due_s, due.spread_s, trip_s)
        self._storage.wait(key, left_s if self._storage.watches else min(learned_s, left_s), self._cancel)


_WAIT_S = 60.0  # as long as a wait for an answer lasts, before the next one begins
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Given:
    """A chunk that a function was given at `at_s`, to be computed with the parameters of `version`."""

    chunk: Chunk
    version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """A message with its gradients; without a message, the end of the function, or an error of the connection."""

    connection: "FunctionConnection"
    message: FunctionMessage | None = None
    vectors: tuple[Tensor, ...] = ()
    error: Exception | None = None


Inbox = queue.SimpleQueue[Received]
"""The queue for all that connections receive."""


class FunctionConnection:
    """One function, from its invocation on.

    It is `ready` once it has said so. `given` are its orders without an answer, by number, and `last` is its newest
    message; it will leave at `leaves_at_s`. Nothing more is expected of a connection that is `over`.
    """

    def __init__(
        self,
        spec: ServerFunctionSpec,
        function: WatchedFunction,
        storage: Storage,
        inbox: Inbox,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.function = spec, function
        self._storage, self._inbox, self._clock = storage, inbox, clock
        self._keys = ServerKeys(Keys.of(spec))
        self._orders: queue.SimpleQueue[WorkOrder | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._number = 0
        self.ready, self.over = False, False
        self.given: dict[int, Given] = {}
        self.last: FunctionMessage | None = None
        self.leaves_at_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"funcpipe-connection-{spec.worker}", daemon=True)
        self._thread.start()

    def begin(self, chunk: Chunk, version: int) -> None:
        """Order `chunk` to be computed, after what was ordered before."""
        order = self._next_order(chunk, version)
        self.given[order.number] = Given(chunk, version, self._clock())
        self._orders.put(order)

    def end(self) -> None:
        """Order the function to end."""
        self._orders.put(self._next_order(None, 0))

    def receive(self, message: FunctionMessage) -> Given | None:
        """Take in a message; return the chunk that it answers, if it does."""
        self.last, self.ready = message, True
        if message.left_s is not None:
            self.leaves_at_s = self._clock() + message.left_s
        return self.given.pop(message.number, None)

    @property
    def is_closing(self) -> bool:
        """True if the function is about to leave, and should get no other order."""
        return self.last is not None and self.last.number > 0 and self._clock() >= self.leaves_at_s

    def function_ended(self) -> None:
        """Expect nothing but what the function has sent before it ended."""
        self._ended.set()
        self._orders.put(None)

    def close(self) -> None:
        """Expect nothing more."""
        self.over = True
        if not self.function.is_unknown:
            self.function.has_ended()
        self.function_ended()

    def join(self) -> None:
        """Wait until a connection that is over makes no more requests to the storage."""
        self._thread.join(_JOIN_S)

    @property
    def billed_s(self) -> float:
        """Seconds that the function is billed for: as it reports, or as long as it was seen."""
        reported_s = 0.0 if self.last is None else self.last.billed_s
        if self.last is not None and self.last.leaves:
            return reported_s
        return max(reported_s, self.function.watched_s())

    def _next_order(self, chunk: Chunk | None, version: int) -> WorkOrder:
        self._number += 1
        return WorkOrder(number=self._number, version=version, chunk=chunk)

    def _run(self) -> None:
        try:
            received = self._await(0)
            while received and (order := self._orders.get()) is not None:
                self._storage.put(self._keys.order(self.spec, order.number), encode_document(order))
                received = self._await(order.number)
            if self._ended.is_set():
                left_while_it_waited = received and self._await(self._number + 1)
                if not left_while_it_waited:
                    self._inbox.put(Received(self))
        except Exception as error:  # noqa: BLE001 - raised by the thread that leads the training
            self._inbox.put(Received(self, error=error))

    def _await(self, number: int) -> bool:
        """Wait for an answer and deliver it; False if there is none. Deletes it and the order."""
        key, arrivals = self._keys.message(self.spec, number), self._arrivals(number)
        while True:
            is_last = self._ended.is_set()
            data = arrivals.get(key, _WAIT_S)
            if data is not None:
                self._inbox.put(Received(self, *unpacked(data, source=key)))
                self._storage.delete_many([key, self._keys.order(self.spec, number)])
                return True
            if is_last:
                return False

    def _arrivals(self, number: int) -> Arrivals:
        """The estimator of answers; it starts anew after the first one, which includes the function's start."""
        if number <= 1:
            self._known = Arrivals(self._storage, self._ended, clock=self._clock)
        return self._known
