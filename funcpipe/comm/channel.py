"""Messages of a run: tensors put under a key, and awaited under a key."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.comm.buffers import Buffers
from funcpipe.comm.patience import Expectation, Patience
from funcpipe.comm.turns import Turns
from funcpipe.core import Wire
from funcpipe.errors import Cancelled, CorruptMessage, DeadlineExceeded, KeyMissing
from funcpipe.platforms.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A message, its size, and for how long it did not exist yet."""

    tensors: dict[str, Tensor]
    payload_bytes: int
    waited_s: float


class Channel:
    """Sends and receives messages through `storage`. Setting `cancel` ends every wait.

    It may be used by several threads: their requests are open side by side, while in each direction the bodies of
    messages move one at a time. Messages of the same name, the last part of their key, come once a step: the last waits
    for them tell when the next is due, where the storage does not tell when it has come.
    """

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
        self._uploading, self._downloading = Turns(), Turns()
        self._buffers = Buffers()
        self._expected: dict[str, Expectation] = defaultdict(lambda: Expectation(patience))

    def put(self, key: str, tensors: Mapping[str, Tensor], *, exact: bool = False) -> int:
        """Write a message; returns its bytes. 32-bit floats travel in the run's wire format unless `exact`."""
        return self.put_series(key, (tensors,), exact=exact)

    def put_series(self, key: str, messages: Sequence[Mapping[str, Tensor]], *, exact: bool = False) -> int:
        """Write messages one behind the other, as one object; returns its bytes."""
        wire = Wire.FP32 if exact else self._wire
        size = sum(codec.message_bytes(tensors, wire) for tensors in messages)
        with self._buffers.lend(size) as buffer:
            self._storage.put(key, codec.encode_series(messages, wire, buffer=buffer), gate=self._uploading)
        return size

    def get(
        self, key: str, *, start: int = 0, stop: int | None = None, into: Mapping[str, Tensor] | None = None
    ) -> Received:
        """Wait for the object and read the message at its bytes [start, stop), the tensors that `into` names into it.

        Raises DeadlineExceeded, Cancelled or CorruptMessage, with the key.
        """
        message, waited_s = self._read(key, start, stop)
        return Received(tensors=_decoded(key, message, into), payload_bytes=len(message), waited_s=waited_s)

    def get_series(self, key: str, into: Sequence[Mapping[str, Tensor]]) -> Received:
        """Wait for an object of messages that was put as a series, and read each into its tensors."""
        message, waited_s = self._read(key, 0, None)
        start = 0
        for tensors in into:
            stop = start + codec.message_bytes(tensors)
            _decoded(key, memoryview(message)[start:stop], tensors)
            start = stop
        return Received(tensors={}, payload_bytes=len(message), waited_s=waited_s)

    def _read(self, key: str, start: int, stop: int | None) -> tuple[bytes, float]:
        expected = self._expected[key.rsplit("/", 1)[-1]]
        began_s = self._clock()
        if not self._storage.watches and expected.due_s > 0:
            self._pause(key, 0.0, expected)
        vain_s: float | None = None
        while True:
            waited_s = self._clock() - began_s
            try:
                message = self._storage.get(key, start=start, stop=stop, gate=self._downloading)
            except KeyMissing:
                vain_s = waited_s
                self._pause(key, self._clock() - began_s, expected)
                continue
            expected.learn(vain_s, waited_s)
            return message, waited_s

    def _pause(self, key: str, waited_s: float, expected: Expectation) -> None:
        left_s = self._patience.deadline_s - waited_s
        if left_s <= 0:
            raise DeadlineExceeded(f"{key} has not come within {self._patience.deadline_s:g} s")
        learned_s = self._patience.pause_s(waited_s, expected.due_s, expected.spread_s)
        self._storage.wait(key, left_s if self._storage.watches else learned_s, self._cancel)
        if self._cancel.is_set():
            raise Cancelled(f"stopped waiting for {key}")


def _decoded(key: str, message: bytes | memoryview, into: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    try:
        return codec.decode(message, into=into)
    except CorruptMessage as error:
        raise CorruptMessage(f"{key}: {error}") from error
