"""Named tensors to bytes and back, without pickle.

A message is a fixed head, a JSON description, and the tensors' bytes, each aligned to 64 bytes::

    magic "FPM1" | bytes of the description | XXH3 of all that follows | description | padding | tensor | …

The description lists for each tensor its name, dtype, shape, the dtype in which it travels, and where its bytes lie. It
is checked against the bytes that are there before anything is allocated.
"""

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from funcpipe.comm.blocks import block
from funcpipe.core import Wire
from funcpipe.errors import CorruptMessage

_MAGIC = b"FPM1"
_HEAD = struct.Struct("<4sIQ")
_ALIGNMENT = 64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_WIRE_DTYPES = {Wire.BF16: torch.bfloat16, Wire.FP16: torch.float16}


def encode(tensors: Mapping[str, Tensor], wire: Wire = Wire.FP32) -> memoryview:
    """The message that holds `tensors`; 32-bit floats travel as `wire` says, everything else as it is."""
    entries = []
    offset = 0
    travelling = []
    for name, tensor in tensors.items():
        sent = _for_wire(tensor, wire)
        travelling.append((offset, sent))
        entries.append([name, _name(tensor.dtype), list(tensor.shape), _name(sent.dtype), offset])
        offset = _aligned(offset + sent.nbytes)
    description = json.dumps(entries, separators=(",", ":")).encode()
    start = _aligned(_HEAD.size + len(description))
    buffer = block(start + offset)
    message = buffer.numpy().data
    message[_HEAD.size : start] = description.ljust(start - _HEAD.size, b"\0")
    for place, sent in travelling:
        end = start + place + sent.nbytes
        buffer[start + place : end].copy_(_bytes_of(sent))
        message[end : _aligned(end)] = bytes(_aligned(end) - end)
    _HEAD.pack_into(message, 0, _MAGIC, len(description), _checksum(message))
    return message


def decode(message: bytes | bytearray | memoryview) -> dict[str, Tensor]:
    """The tensors of a message, in memory of their own; raises CorruptMessage unless the bytes are a whole message."""
    view = memoryview(message)
    if view.nbytes < _HEAD.size:
        raise CorruptMessage(f"{view.nbytes} bytes are too few for a message")
    magic, length, checksum = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        raise CorruptMessage(f"a message begins with {_MAGIC!r}, these bytes with {magic!r}")
    if _checksum(view) != checksum:
        raise CorruptMessage(
            f"the checksum of a message of {view.nbytes} bytes is wrong: truncated, or changed on its way"
        )
    start = _aligned(_HEAD.size + length)
    try:
        entries = json.loads(bytes(view[_HEAD.size : _HEAD.size + length]))
        return {entry[0]: _read(entry, view[start:]) for entry in entries}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise CorruptMessage(f"the description of a message cannot be read: {error}") from error


def _read(entry: list[Any], payload: memoryview) -> Tensor:
    _, dtype_name, shape, wire_name, offset = entry
    sent_dtype = _DTYPES[wire_name]
    count = math.prod(shape)
    size = count * sent_dtype.itemsize
    if min([*shape, offset, 0]) < 0 or offset + size > payload.nbytes:
        raise ValueError(f"a tensor of shape {shape} at byte {offset} does not lie within {payload.nbytes} bytes")
    if count == 0:
        return torch.empty(shape, dtype=_DTYPES[dtype_name])
    own = block(size)
    own.numpy().data[:] = payload[offset : offset + size]
    return own.view(sent_dtype).reshape(shape).to(_DTYPES[dtype_name])


def _for_wire(tensor: Tensor, wire: Wire) -> Tensor:
    tensor = tensor.detach()
    if tensor.dtype is torch.float32 and wire in _WIRE_DTYPES:
        tensor = tensor.to(_WIRE_DTYPES[wire])
    return tensor.contiguous()


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # one element may have any stride and yet count as contiguous
    return flat.view(torch.uint8)


def _checksum(message: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(message[_HEAD.size :])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
