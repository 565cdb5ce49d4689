"""Messages of a run: tensors put under a key, and awaited under a key."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core import Wire
from funcpipe.errors import Cancelled, CorruptMessage, DeadlineExceeded, KeyMissing
from funcpipe.platforms.base import Storage

_REMEMBERED = 4  # waits for messages of one name


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How to wait for an object: at first until it is nearly due, then with pauses that are a share of the wait.

    So the last pause adds little to the wait, and vain requests are few: some while the object is due, and as many as
    the logarithm of the delay when it is late or when nothing is known of it.
    """

    deadline_s: float
    least_s: float = 0.0005
    most_s: float = 0.05
    late_share: float = 0.1
    due_share: float = 0.02

    def pause_s(self, waited_s: float, due_s: float = 0.0) -> float:
        """How long to pause after `waited_s` of waiting for what has never yet come before `due_s`."""
        left_s = max(self.deadline_s - waited_s, 0.0)
        early_s = (1 - 2 * self.late_share) * due_s - waited_s
        if early_s > 0:
            return min(max(early_s, self.least_s), left_s)
        pause_s = max(self.due_share * due_s, self.late_share * (waited_s - due_s), self.least_s)
        return min(pause_s, self.most_s, left_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message, its size, and for how long it did not exist yet."""

    tensors: dict[str, Tensor]
    payload_bytes: int
    waited_s: float


class Channel:
    """Sends and receives messages through `storage`. Setting `cancel` ends every wait.

    Messages of the same name, the last part of their key, come once a step: the last waits for them tell when the next
    is due.
    """

    def __init__(
        self,
        storage: Storage,
        patience: Patience,
        *,
        cancel: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._patience = patience
        self._cancel = cancel
        self._clock = clock
        self._waits_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def put(self, key: str, tensors: Mapping[str, Tensor], *, wire: Wire = Wire.FP32) -> int:
        """Write a message; returns its bytes. 32-bit floats travel as `wire` says."""
        message = codec.encode(tensors, wire)
        self._storage.put(key, message)
        return message.nbytes

    def get(self, key: str) -> Received:
        """Wait for a message and read it; raises DeadlineExceeded, Cancelled or CorruptMessage, with the key."""
        waits_s = self._waits_s[key.rsplit("/", 1)[-1]]
        due_s = min(waits_s, default=0.0)
        began_s = self._clock()
        while True:
            asked_s = self._clock()
            try:
                message = self._storage.get(key)
                break
            except KeyMissing:
                self._pause(key, asked_s - began_s, due_s)
        waits_s.append(asked_s - began_s)
        try:
            tensors = codec.decode(message)
        except CorruptMessage as error:
            raise CorruptMessage(f"{key}: {error}") from error
        return Received(tensors=tensors, payload_bytes=len(message), waited_s=asked_s - began_s)

    def _pause(self, key: str, waited_s: float, due_s: float) -> None:
        if waited_s >= self._patience.deadline_s:
            raise DeadlineExceeded(f"{key} has not come within {self._patience.deadline_s:g} s")
        if self._cancel.wait(self._patience.pause_s(waited_s, due_s)):
            raise Cancelled(f"stopped waiting for {key}")
