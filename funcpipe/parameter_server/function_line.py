"""The client's line to one function: a thread that writes its orders and reads its answers."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from funcpipe.core import ServerFunctionSpec
from funcpipe.parameter_server.arrivals import Arrivals
from funcpipe.parameter_server.function_messages import FunctionMessage, ServerKeys, WorkOrder, unpacked
from funcpipe.parameter_server.values import Chunk
from funcpipe.platforms.base import Handle, Storage
from funcpipe.runstate.documents import encode_document
from funcpipe.runstate.keys import Keys

_LOOK_S = 60.0  # as long as a wait for an answer lasts, before the next one begins
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Given:
    """A chunk that a function was given at `at_s`, to be computed with the parameters of `version`."""

    chunk: Chunk
    version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    """What a line tells: a message with its gradients; the function's end, if there is none; or an error of its own."""

    line: "FunctionLine"
    message: FunctionMessage | None = None
    vectors: tuple[Tensor, ...] = ()
    error: Exception | None = None


Told = queue.SimpleQueue[Heard]
"""Where lines put what they hear."""


class FunctionLine:
    """One function, from its invocation on.

    It is `ready` once it has said so. `given` are its orders without an answer, by number, and `last` is its newest
    message; it will leave at `leaves_at_s`. Nothing more is expected of a line that is `over`.
    """

    def __init__(
        self,
        spec: ServerFunctionSpec,
        handle: Handle,
        storage: Storage,
        told: Told,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.handle = spec, handle
        self._storage, self._told, self._clock = storage, told, clock
        self._keys = ServerKeys(Keys.of(spec))
        self._orders: queue.SimpleQueue[WorkOrder | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._number = 0
        self._ended_s: float | None = None
        self.began_s = clock()
        self.ready, self.over = False, False
        self.given: dict[int, Given] = {}
        self.last: FunctionMessage | None = None
        self.leaves_at_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"funcpipe-line-{spec.worker}", daemon=True)
        self._thread.start()

    def begin(self, chunk: Chunk, version: int) -> None:
        """Order `chunk` to be computed, after what was ordered before."""
        order = self._next_order(chunk, version)
        self.given[order.number] = Given(chunk, version, self._clock())
        self._orders.put(order)

    def end(self) -> None:
        """Order the function to end."""
        self._orders.put(self._next_order(None, 0))

    def hear(self, message: FunctionMessage) -> Given | None:
        """Take note of a message; what it answers, if that was a chunk."""
        self.last, self.ready = message, True
        if message.left_s is not None:
            self.leaves_at_s = self._clock() + message.left_s
        return self.given.pop(message.number, None)

    @property
    def is_closing(self) -> bool:
        """Whether the function is about to leave, so that it is better not given another order."""
        return self.last is not None and self.last.number > 0 and self._clock() >= self.leaves_at_s

    def function_ended(self) -> None:
        """The platform says that the function has ended: tell so, after whatever else it has sent."""
        self._ended_s = self._clock()
        self._ended.set()
        self._orders.put(None)

    @property
    def has_ended(self) -> bool:
        """Whether the platform has said that the function has ended."""
        return self._ended.is_set()

    def close(self) -> None:
        """Expect nothing more."""
        self.over = True
        self._ended_s = self._clock() if self._ended_s is None else self._ended_s
        self._ended.set()
        self._orders.put(None)

    def join(self) -> None:
        """Return when a line that is over asks nothing more of the storage."""
        self._thread.join(_JOIN_S)

    @property
    def billed_s(self) -> float:
        """For how long the function is billed: as it says itself, if it could, or as long as it was seen."""
        told_s = 0.0 if self.last is None else self.last.billed_s
        if self.last is not None and self.last.leaves:
            return told_s
        return max(told_s, (self._clock() if self._ended_s is None else self._ended_s) - self.began_s)

    def _next_order(self, chunk: Chunk | None, version: int) -> WorkOrder:
        self._number += 1
        return WorkOrder(number=self._number, version=version, chunk=chunk)

    def _run(self) -> None:
        try:
            heard = self._await(0)
            while heard and (order := self._orders.get()) is not None:
                self._storage.put(self._keys.order(self.spec, order.number), encode_document(order))
                heard = self._await(order.number)
            if self._ended.is_set():
                left_while_it_waited = heard and self._await(self._number + 1)
                if not left_while_it_waited:
                    self._told.put(Heard(self))
        except Exception as error:  # noqa: BLE001 - told to the thread that leads the training, which raises it
            self._told.put(Heard(self, error=error))

    def _await(self, number: int) -> bool:
        """Wait for an answer, and tell it; whether there was one. It is deleted, and so is the order."""
        key, arrivals = self._keys.message(self.spec, number), self._arrivals(number)
        while True:
            is_last = self._ended.is_set()
            data = arrivals.get(key, _LOOK_S)
            if data is not None:
                self._told.put(Heard(self, *unpacked(data, source=key)))
                self._storage.delete_many([key, self._keys.order(self.spec, number)])
                return True
            if is_last:
                return False

    def _arrivals(self, number: int) -> Arrivals:
        """What knows how long answers take; the first ones, of a function that starts, teach nothing."""
        if number <= 1:
            self._known = Arrivals(self._storage, self._ended, clock=self._clock)
        return self._known
