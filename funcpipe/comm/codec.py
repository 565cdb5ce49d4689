"""Named tensors to bytes and back, without pickle.

A message is a fixed head, a JSON description and the bytes of the tensors, each aligned to 64 bytes::

    magic "FPM2" | length of the description | 28 bytes that prove the rest whole | description | padding | tensor | …

The description lists each tensor's name, dtype, shape, form on the wire (`wire_form.py`), and offset. It is checked
against the bytes of the message before anything is allocated. Every tensor is copied once, and cast in the same pass.
The length of a message follows from dtypes and shapes alone, so several messages may share an object and be read one by
one.

Within a run, messages are signed (`signature.py`): only with the run's key can one be made, and a message passes only
in the object and at the offset that it was written for. Elsewhere an XXH3 of the rest, which takes as many bytes, shows
accidents.

For example, `{"x": torch.zeros(3)}` sent as bf16: the head has 36 bytes, the description
`[["x","float32",[3],"bfloat16",0]]` 34; padded to 128 bytes, then 6 bytes of values, padded again: 192 bytes.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.comm.buffer_pool import block
from funcpipe.comm.signature import CHECKSUM, PROOF_BYTES, Proof
from funcpipe.comm.wire_form import DTYPES, FORMS, WireForm, dtype_name, form_of
from funcpipe.core import Wire
from funcpipe.errors import CorruptMessage, InvalidValue

_MAGIC = b"FPM2"
_HEAD = struct.Struct(f"<4sI{PROOF_BYTES}s")
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of the parts of a message.

    `placed` holds for each tensor its offset after `start`, the tensor, and its form on the wire; `size` is in bytes.
    """

    description: bytes
    start: int
    placed: tuple[tuple[int, Tensor, WireForm], ...]
    size: int


def message_bytes(tensors: Mapping[str, Tensor], wire: Wire = Wire.FP32) -> int:
    """Return the size of the message that holds `tensors`."""
    return _lay_out(tensors, wire).size


def encode(
    tensors: Mapping[str, Tensor], wire: Wire = Wire.FP32, *, buffer: Tensor | None = None, proof: Proof = CHECKSUM
) -> memoryview:
    """Return the message that holds `tensors`; 32-bit floats travel as `wire` says, everything else as it is."""
    return encode_series((tensors,), wire, buffer=buffer, proof=proof)


def encode_series(
    messages: Sequence[Mapping[str, Tensor]],
    wire: Wire = Wire.FP32,
    *,
    buffer: Tensor | None = None,
    proof: Proof = CHECKSUM,
) -> memoryview:
    """Messages one after another, each of which can be decoded by itself, with its `proof`.

    They are written to the beginning of `buffer` if one is given: of dtype uint8, at least `message_bytes` long.
    """
    layouts = [_lay_out(tensors, wire) for tensors in messages]
    size = sum(layout.size for layout in layouts)
    if buffer is None:
        buffer = block(size)
    elif buffer.numel() < size:
        raise InvalidValue("buffer", buffer.numel(), f"must have room for {size} bytes")
    offset = 0
    for layout in layouts:
        _write(layout, buffer[offset : offset + layout.size], proof, offset)
        offset += layout.size
    return buffer.numpy().data[:size]


def decode(
    message: bytes | bytearray | memoryview,
    *,
    into: Mapping[str, Tensor] | None = None,
    proof: Proof = CHECKSUM,
    offset: int = 0,
) -> dict[str, Tensor]:
    """The tensors of a message, in their own memory; raises CorruptMessage unless the bytes are one whole message.

    It has to have been encoded with the same `proof`, `offset` bytes after the first message of its series.
    Tensors that `into` names are written there; they must be contiguous and have the shape that was sent, and the dtype
    that they had or, unless that was int8 with scales, travelled in.
    """
    view = memoryview(message)
    if view.nbytes < _HEAD.size:
        raise CorruptMessage(f"{view.nbytes} bytes are too few for a message")
    magic, length, proven = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptMessage(f"a message begins with {_MAGIC!r}, these bytes with {magic!r}")
    if not proof.holds(proven, view[_HEAD.size :], offset):
        raise CorruptMessage(
            f"a message of {view.nbytes} bytes is not as it was written: truncated or changed, or another's"
        )
    start = _aligned(_HEAD.size + length)
    try:
        entries = json.loads(bytes(view[_HEAD.size : _HEAD.size + length]))
        _check_places(entries)
        return {entry[0]: _read(entry, view[start:], (into or {}).get(entry[0])) for entry in entries}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise CorruptMessage(f"the description of a message cannot be read: {error}") from error


def is_same(
    written: memoryview, found: bytes, messages: Sequence[Mapping[str, Tensor]], wire: Wire, *, proof: Proof
) -> bool:
    """Return True if `found`, the series `messages` as it was read, is proven and holds what `written` holds."""
    if len(found) != written.nbytes:
        return False
    view, start = memoryview(found), 0
    for tensors in messages:
        stop = start + message_bytes(tensors, wire)
        rest, proven = view[start + _HEAD.size : stop], _HEAD.unpack_from(view, start)[2]
        if rest != written[start + _HEAD.size : stop] or not proof.holds(proven, rest, start):
            return False
        start = stop
    return True


def _lay_out(tensors: Mapping[str, Tensor], wire: Wire) -> _Layout:
    entries = []
    placed = []
    offset = 0
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise InvalidValue(name, f"a tensor of {tensor.dtype}, {tensor.layout}", "must be dense, not quantised")
        form = form_of(tensor.dtype, wire)
        placed.append((offset, tensor, form))
        entries.append([name, dtype_name(tensor.dtype), list(tensor.shape), form.name, offset])
        offset = _aligned(offset + form.size(tensor.numel()))
    description = json.dumps(entries, separators=(",", ":")).encode()
    start = _aligned(_HEAD.size + len(description))
    return _Layout(description, start, tuple(placed), start + offset)


def _write(layout: _Layout, buffer: Tensor, proof: Proof, place: int) -> None:
    message = buffer.numpy().data
    message[_HEAD.size : layout.start] = layout.description.ljust(layout.start - _HEAD.size, b"\0")
    for offset, tensor, form in layout.placed:
        first = layout.start + offset
        end = first + form.size(tensor.numel())
        if tensor.numel():
            form.write(tensor.detach(), buffer[first:end])
        message[end : _aligned(end)] = bytes(_aligned(end) - end)
    _HEAD.pack_into(message, 0, _MAGIC, len(layout.description), proof.of(message[_HEAD.size :], place))


def _check_places(entries: list[Any]) -> None:
    """Raise CorruptMessage if two tensors share bytes, so that no more is allocated than was sent."""
    end = 0
    for _, _, shape, form_name, offset in entries:
        if offset < end:
            raise ValueError(f"a tensor begins at byte {offset}, before the one before it ends")
        end = offset + FORMS[form_name].size(math.prod(shape))


def _read(entry: list[Any], payload: memoryview, target: Tensor | None) -> Tensor:
    _, name, shape, form_name, offset = entry
    dtype, form = DTYPES[name], FORMS[form_name]
    count = math.prod(shape)
    size = form.size(count)
    if min([*shape, offset, 0]) < 0 or offset + size > payload.nbytes:
        raise ValueError(f"a tensor of shape {shape} at byte {offset} is not within the {payload.nbytes} bytes")
    if target is None:
        target = block(count * dtype.itemsize).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    if not form.fits(target, dtype) or list(target.shape) != shape or not target.is_contiguous():
        sent = f"a tensor of {dtype}, shape {shape}, sent as {form_name}"
        raise ValueError(f"{sent}, does not fit {target.dtype}, {list(target.shape)}")
    if count:
        form.read(payload[offset : offset + size], target)
    return target


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
