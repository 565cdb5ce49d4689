"""A function that computes gradients for a parameter server.

order | gets the parameters, if they are newer | computes | puts its gradients | order | … | leaves in time

A function that leaves says so with its last gradients, or without any while it waits. Its open orders are given to
others.
"""

import hashlib
import logging
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import RequestCounts, ServerFunctionSpec, from_text
from funcpipe.core.logs import in_function
from funcpipe.core.run_key import RunKey
from funcpipe.core.settings import leaves_at_s
from funcpipe.core.texts import error_text, shortened
from funcpipe.errors import CorruptMessage, DeadlineExceeded, StorageError
from funcpipe.neighbours.parameter_server.function_connection import (
    Arrivals,
    FunctionMessage,
    ServerKeys,
    WorkOrder,
    packed,
)
from funcpipe.neighbours.parameter_server.server import Replica, ServerJob
from funcpipe.neighbours.parameter_server.worker_group import Chunk
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage, Storage
from funcpipe.runstate.checkpoints import deserialised
from funcpipe.runstate.documents import decode_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import OneKey, SignedStorage

_log = logging.getLogger(__name__)

_PATIENCE = 2
"""Message deadlines that a function waits for work; the client waits one for a silent function."""


def main(payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked) -> None:
    """Be the function of `payload`, the JSON of a ServerFunctionSpec. Ends with exit code 1 if it fails."""
    spec = from_text(ServerFunctionSpec, payload, source="the invocation payload")
    allocator.configure()
    torch.set_num_threads(1)
    with in_function(run=spec.run, worker=spec.worker, attempt=spec.attempt, levels=spec.log_level):
        storage = open_storage(spec.storage, retry_s=spec.message_deadline_s, meter=invoked.meter)
        ended_well = run_function(spec, storage, invoked=invoked)
    if not ended_well:
        raise SystemExit(1)


def run_function(spec: ServerFunctionSpec, storage: Storage, *, invoked: Invoked) -> bool:
    """Be the function of `spec`; False if it failed, for the reason in its last message."""
    function = _Function(spec, SignedStorage(storage, OneKey(RunKey(spec.run_key))), invoked)
    try:
        function.work()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the client
        _log.error("failed: %s", error, exc_info=error)
        function.report_failure(error)
        return False
    return True


class _Function:
    """A running function. `self._number` is that of the order that it computes, or waits for."""

    def __init__(self, spec: ServerFunctionSpec, storage: Storage, invoked: Invoked) -> None:
        self._spec, self._storage, self._invoked = spec, storage, invoked
        self._keys = ServerKeys(Keys.of(spec))
        self._arrivals = Arrivals(storage, threading.Event())
        self._parameters: tuple[int, Mapping[str, Tensor]] | None = None
        self._number = 0
        self._longest_s = 0.0

    def work(self) -> None:
        """Carry out orders until the order to end, or until the end of this function's lifetime is near."""
        replica = Replica(self._job(), self._storage, self._keys.root)
        self._send(self._message())
        _log.info("ready")
        while (order := self._next_order()) is not None:
            if order.chunk is None:
                self._send(self._message(leaves=True))
                _log.info("ends after %d orders, as ordered", self._number - 1)
                return
            if self._compute(replica, order, order.chunk):
                _log.info("leaves after %d orders: its lifetime is nearly over", self._number)
                return

    def report_failure(self, error: BaseException) -> None:
        """Send the error as the answer to the order that it came with."""
        text = shortened("".join(traceback.format_exception(error)))
        message = self._message(
            leaves=True,
            error=f"{error_text(error)}\n{text}",
            retryable=isinstance(error, StorageError | CorruptMessage | DeadlineExceeded),
            out_of_memory=isinstance(error, MemoryError),
        )
        self._send(message)

    def _job(self) -> ServerJob:
        key = self._keys.keys.bundle(0)
        bundle = self._storage.get(key)
        if hashlib.sha256(bundle).hexdigest() != self._spec.bundle_sha256:
            raise CorruptMessage(f"{key} is not the code that the invocation names: its SHA-256 differs")
        tensors_key = self._keys.keys.parameters(0)
        tensors = deserialised(tensors_key, self._storage.get(tensors_key))
        return ServerJob(bundle=bundle, tensors=tensors, seed=self._spec.seed)

    def _next_order(self) -> WorkOrder | None:
        """The next order; None if this function's lifetime ends before it comes. Raises DeadlineExceeded."""
        self._number += 1
        key = self._keys.order(self._spec, self._number)
        deadline_s = _PATIENCE * self._spec.message_deadline_s
        left_s = self._left_s()
        if left_s is not None:  # an order that is on its way still fits; before its first, no function leaves at all
            left_s = left_s + self._longest_s if self._longest_s else None
        data = self._arrivals.get(key, deadline_s if left_s is None else min(deadline_s, left_s))
        if data is not None:
            return decode_document(WorkOrder, data, source=key)
        if left_s is None or left_s > deadline_s:
            raise DeadlineExceeded(
                f"no work has come for {deadline_s:g} s: the client that leads the training seems to be gone"
            )
        self._send(self._message(leaves=True))
        _log.info("leaves while it waits: its lifetime is nearly over")
        return None

    def _compute(self, replica: Replica, order: WorkOrder, chunk: Chunk) -> bool:
        """Compute and push; True if this function leaves now."""
        began_s = time.monotonic()
        parameters = self._pull(order.version)
        pulled_s = time.monotonic()
        push = replica.work(order.version, parameters, chunk)
        computed_s = time.monotonic()
        self._longest_s = max(self._longest_s, computed_s - began_s)
        left_s = self._left_s()
        leaves = left_s is not None and left_s <= 0
        message = self._message(
            version=order.version,
            loss_sums=push.loss_sums,
            pull_s=pulled_s - began_s,
            compute_s=computed_s - pulled_s,
            leaves=leaves,
        )
        self._send(message, push.vectors)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        return leaves

    def _pull(self, version: int) -> Mapping[str, Tensor]:
        if self._parameters is None or self._parameters[0] != version:
            key = self._keys.parameters(version)
            self._parameters = version, deserialised(key, self._storage.get(key))
        return self._parameters[1]

    def _left_s(self) -> float | None:
        """Seconds until this function leaves, early enough for two more orders; None if it need not."""
        lifetimes_s = [s for s in (self._spec.lifetime_s, self._invoked.lifetime_s) if s is not None]
        if not lifetimes_s:
            return None
        age_s = time.monotonic() - self._invoked.at_s
        return leaves_at_s(min(lifetimes_s), self._longest_s, 0.0) - age_s

    def _message(self, **fields: Any) -> FunctionMessage:
        return FunctionMessage(
            number=self._number,
            billed_s=self._invoked.billed_s,
            requests=self._invoked.meter.counts + RequestCounts(puts=1),  # with this message
            left_s=self._left_s(),
            **fields,
        )

    def _send(self, message: FunctionMessage, vectors: Sequence[Tensor] = ()) -> None:
        self._storage.put(self._keys.message(self._spec, message.number), packed(message, vectors))
