"""The client's connection to one function: a thread that writes its orders and reads its answers."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from funcpipe.core import ServerFunctionSpec
from funcpipe.neighbours.parameter_server.arrivals import Arrivals
from funcpipe.neighbours.parameter_server.function_messages import FunctionMessage, ServerKeys, WorkOrder, unpacked
from funcpipe.neighbours.parameter_server.values import Chunk
from funcpipe.platforms.base import Storage
from funcpipe.platforms.function_group import WatchedFunction
from funcpipe.runstate.documents import encode_document
from funcpipe.runstate.keys import Keys

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
