"""The messages between a parameter server's client and its functions, through a storage.

    run-1/g0000-3fa9/server/work/f0/0001/00000007      what attempt 1 of the worker f0 is to compute next, as JSON
    run-1/g0000-3fa9/server/pushes/f0/0001/00000007    what it has computed: JSON, then gradients as safetensors
    run-1/g0000-3fa9/server/parameters/00000041        the parameters after 41 updates, as safetensors

Each attempt has orders of its own, so that a function that was given up, but was only slow, does no harm. Message 0
says that a function is ready; each order is answered by the message of its number.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from funcpipe.core import RequestCounts, ServerFunctionSpec, from_text, to_text
from funcpipe.errors import CorruptMessage, FormatError
from funcpipe.neighbours.parameter_server.values import Chunk
from funcpipe.runstate.checkpoints import deserialised, serialised
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
