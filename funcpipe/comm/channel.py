"""Messages of a run: tensors put under a key, and awaited under a key."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core import Wire
from funcpipe.errors import Cancelled, CorruptMessage, DeadlineExceeded, KeyMissing
from funcpipe.platforms.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How to wait for an object: a pause is a fixed share of the time waited so far, within bounds.

    So the last pause adds at most `share` to the wait, and the number of vain requests grows with its logarithm only.
    """

    deadline_s: float
    least_s: float = 0.0005
    most_s: float = 0.05
    share: float = 0.1

    def pause_s(self, waited_s: float) -> float:
        """How long to pause after `waited_s` of waiting."""
        return min(max(self.share * waited_s, self.least_s), self.most_s, max(self.deadline_s - waited_s, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message, its size, and for how long it did not exist yet."""

    tensors: dict[str, Tensor]
    payload_bytes: int
    waited_s: float


class Channel:
    """Sends and receives messages through `storage`. Setting `cancel` ends every wait."""

    def __init__(
        self,
        storage: Storage,
        patience: Patience,
        *,
        wire: Wire,
        cancel: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._patience = patience
        self._wire = wire
        self._cancel = cancel
        self._clock = clock

    def put(self, key: str, tensors: Mapping[str, Tensor], *, exact: bool = False) -> int:
        """Write a message; returns its bytes. 32-bit floats travel in the run's wire format unless `exact`."""
        message = codec.encode(tensors, Wire.FP32 if exact else self._wire)
        self._storage.put(key, message)
        return message.nbytes

    def get(self, key: str) -> Received:
        """Wait for a message and read it; raises DeadlineExceeded, Cancelled or CorruptMessage, with the key."""
        began_s = self._clock()
        while True:
            asked_s = self._clock()
            try:
                message = self._storage.get(key)
                break
            except KeyMissing:
                self._pause(key, asked_s - began_s)
        try:
            tensors = codec.decode(message)
        except CorruptMessage as error:
            raise CorruptMessage(f"{key}: {error}") from error
        return Received(tensors=tensors, payload_bytes=len(message), waited_s=asked_s - began_s)

    def _pause(self, key: str, waited_s: float) -> None:
        if waited_s >= self._patience.deadline_s:
            raise DeadlineExceeded(f"{key} has not come within {self._patience.deadline_s:g} s")
        if self._cancel.wait(self._patience.pause_s(waited_s)):
            raise Cancelled(f"stopped waiting for {key}")
