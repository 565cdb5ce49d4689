"""Tensors in safetensors files in object storage: read one by one, by ranges of bytes; and files of such tensors.

    8 bytes: length of the header | header, JSON | the bytes of all tensors, one after another

The header lists each tensor's dtype, shape and place. A client reads headers alone. A function reads its own stage's
tensors, after it has found that the header still is the one that the client has read.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import WeightFile
from funcpipe.errors import CorruptMessage, DataError, KeyMissing, StorageError
from funcpipe.platforms.base import OpenStorage, RequestMeter, Storage

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself allows
_FIRST_BYTES = 64 * 1024  # most headers are shorter
_PIECE_BYTES = 8 << 20  # held besides the tensors, as many as are asked for at once
_GAP_BYTES = 64 * 1024  # read along rather than asked for apart
_AT_ONCE = 4

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
"""The dtypes by the names that the format has for them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names of these dtypes in the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that takes the bytes [start, stop) of `file`, which have that SHA-256 where it is known."""

    file: WeightFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    sha256: str = ""


def read_header(storage: Storage, url: str, key: str) -> dict[str, StoredTensor]:
    """Return the tensors of the safetensors file `key` in `storage`, at `url`, by name; only its header is read.

    Raises DataError for a file that is no whole one, or missing.
    """
    place = WeightFile(url=url, key=key, header_bytes=0, header_sha256="").place
    try:
        head = read_head(storage, key)
    except KeyMissing:
        raise DataError(f"there is no file of weights {place}; give a folder or a file that is there") from None
    except ValueError as error:
        raise DataError(f"{place} is no safetensors file: {error}") from error
    header_bytes = len(head)
    file = WeightFile(url=url, key=key, header_bytes=header_bytes, header_sha256=hashlib.sha256(head).hexdigest())
    try:
        found = {name: _stored(file, entry) for name, entry in entries_of(head).items()}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"the header of {place} cannot be read: {error}; write the file again") from error
    end = max((tensor.stop for tensor in found.values()), default=header_bytes)
    if len(storage.get(key, start=max(end - 1, 0))) != 1:
        raise DataError(f"{place} is not {end} bytes long, as its header says; copy or write the file again")
    return found


_META = "__metadata__"


def read_head(storage: Storage, key: str) -> bytes:
    """Return the beginning of a safetensors file, up to the first tensor. Raises ValueError for another file."""
    begin = storage.get(key, stop=_FIRST_BYTES)
    header_bytes = _LENGTH.size + (_LENGTH.unpack_from(begin)[0] if len(begin) >= _LENGTH.size else _MOST_HEADER_BYTES)
    if header_bytes >= _MOST_HEADER_BYTES:
        raise ValueError("it does not begin with a header's length")
    head = begin[:header_bytes]
    return head + (storage.get(key, start=len(head), stop=header_bytes) if len(head) < header_bytes else b"")


def entries_of(head: bytes) -> dict[str, Any]:
    """Return what the head of a file says of each tensor, by name. Raises ValueError or AttributeError if nothing."""
    return {name: entry for name, entry in json.loads(head[_LENGTH.size :]).items() if name != _META}


def _stored(file: WeightFile, entry: Mapping[str, object]) -> StoredTensor:
    first, stop = entry["data_offsets"]  # type: ignore[misc]
    dtype, shape = DTYPES[str(entry["dtype"])], tuple(map(int, entry["shape"]))  # type: ignore[call-overload]
    if first < 0 or stop - first != math.prod(shape) * dtype.itemsize:  # type: ignore[has-type]
        raise ValueError(f"a tensor of {dtype} and shape {list(shape)} cannot take {stop - first} bytes")  # type: ignore[has-type]
    begin = file.header_bytes
    return StoredTensor(file=file, dtype=dtype, shape=shape, start=begin + first, stop=begin + stop)  # type: ignore[has-type]


def fill(
    targets: Iterable[tuple[StoredTensor, Tensor]], open_storage: OpenStorage, meter: RequestMeter | None = None
) -> int:
    """Read stored tensors into tensors of their shapes and dtypes; return the bytes that were read.

    `open_storage` opens the storage of each file, and `meter` counts the requests. Raises CorruptMessage for a file
    that is not the one whose header was read before, and for a tensor with another SHA-256.
    """
    given = [(stored, tensor, _in_order(tensor)) for stored, tensor in targets]
    pairs = sorted([(stored, place) for stored, _, place in given], key=_place)
    by_file = {file: list(own) for file, own in groupby(pairs, lambda pair: pair[0].file)}
    storages = {url: open_storage(url, first_s=None, meter=meter) for url in dict.fromkeys(f.url for f in by_file)}
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(lambda file: _check(storages[file.url], file), by_file))
        jobs = [(storages[file.url], file, read) for file, own in by_file.items() for read in _reads(own)]
        read = sum(threads.map(lambda job: _read(*job), jobs))
    for stored, tensor, place in given:
        if stored.sha256 and sha256_of(place) != stored.sha256:
            raise CorruptMessage(f"{stored.file.place} is damaged: a tensor of it has another SHA-256")
        if place.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(place)
    return read


def read_tensor(stored: StoredTensor, open_storage: OpenStorage) -> Tensor:
    """Return a stored tensor. Raises as `fill` does."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    fill([(stored, tensor)], open_storage)
    return tensor


def below(tensor: StoredTensor, folder: str) -> StoredTensor:
    """Return `tensor`, in `folder` if it is in a file of the run that is called by its name alone."""
    file = tensor.file
    if file.url or "/" in file.key:
        return tensor
    return replace(tensor, file=replace(file, key=folder + file.key))


def opening(storage: Storage, open_storage: OpenStorage) -> OpenStorage:
    """Return what opens the storage of a file of a base: `storage` is that of the run."""

    def opened(url: str, **given: object) -> Storage:
        return open_storage(url, **given) if url else storage  # type: ignore[arg-type]

    return opened


def _in_order(tensor: Tensor) -> Tensor:
    """`tensor`, or room for its elements in order if they are in no order here."""
    plain = tensor.detach()
    return plain if plain.is_contiguous() else torch.empty(plain.shape, dtype=plain.dtype)


def sha256_of(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of `tensor` as a file has them."""
    return hashlib.sha256(_raw(tensor)).hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


@dataclass(frozen=True, eq=False)
class TensorFile:
    """A safetensors file with this `header`, and after it the `tensors` in order; it is called by the header's SHA-256,
    and the header has that of each tensor.
    """

    header: bytes
    tensors: Sequence[Tensor]

    @property
    def name(self) -> str:
        """The name of the file, which says what is in it."""
        return f"{hashlib.sha256(self.header).hexdigest()}.safetensors"

    def contents(self) -> bytes:
        """Return the file."""
        return b"".join([self.header, *map(_raw, self.tensors)])

    def write(self, path: str) -> None:
        """Write the file to `path`."""
        with open(path, "wb") as file:
            file.write(self.header)
            for tensor in self.tensors:
                file.write(_raw(tensor))


def make_file(tensors: Mapping[str, Tensor]) -> tuple[TensorFile, dict[str, StoredTensor]]:
    """Return the file of `tensors`, which have dtypes that the format has, and their places in it, by name."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    digests = {name: sha256_of(tensor) for name, tensor in ordered}
    ends = list(accumulate((tensor.numel() * tensor.dtype.itemsize for _, tensor in ordered), initial=0))
    entries: dict[str, object] = {_META: {"format": "pt", "sha256": json.dumps(digests)}}
    for (name, tensor), start, stop in zip(ordered, ends, ends[1:], strict=False):
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = TensorFile(_LENGTH.pack(len(text)) + text, [tensor for _, tensor in ordered])
    digest = file.name.partition(".")[0]
    place = WeightFile(url="", key=file.name, header_bytes=len(file.header), header_sha256=digest)
    begin = len(file.header)
    return file, {
        name: StoredTensor(
            file=place,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            start=begin + start,
            stop=begin + stop,
            sha256=digests[name],
        )
        for (name, tensor), start, stop in zip(ordered, ends, ends[1:], strict=False)
    }


def _place(pair: tuple[StoredTensor, Tensor]) -> tuple[str, str, int]:
    return pair[0].file.url, pair[0].file.key, pair[0].start


def _check(storage: Storage, file: WeightFile) -> None:
    head = _bytes(storage, file, 0, file.header_bytes)
    if hashlib.sha256(head).hexdigest() != file.header_sha256:
        raise CorruptMessage(
            f"{file.place} has changed since the run began: the SHA-256 of its header differs; put the file back that "
            "the run began with, or start a new run"
        )


def _bytes(storage: Storage, file: WeightFile, start: int, stop: int) -> bytes:
    try:
        found = storage.get(file.key, start=start, stop=stop)
    except KeyMissing as error:
        raise StorageError(f"{file.place} is gone, a file of weights that the run reads; put it back") from error
    if len(found) != stop - start:
        raise CorruptMessage(f"{file.place} has changed since the run began: it ends before byte {stop}")
    return found


_Part = tuple[int, int, Tensor]
"""The bytes [start, stop) of a file, and where they go: dtype uint8, just as long."""


def _reads(pairs: list[tuple[StoredTensor, Tensor]]) -> Iterator[list[_Part]]:
    """Yield what one request reads, of pairs in the order of the file: pieces of large tensors, many small ones."""
    group: list[_Part] = []
    for stored, tensor in pairs:
        flat = tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        for start in range(stored.start, stored.stop, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, stored.stop)
            if group and (start - group[-1][1] > _GAP_BYTES or stop - group[0][0] > _PIECE_BYTES):
                yield group
                group = []
            group.append((start, stop, flat[start - stored.start : stop - stored.start]))
    if group:
        yield group


def _read(storage: Storage, file: WeightFile, parts: list[_Part]) -> int:
    begin, end = parts[0][0], max(stop for _, stop, _ in parts)
    data = memoryview(_bytes(storage, file, begin, end))
    for start, stop, place in parts:
        place.numpy().data[:] = data[start - begin : stop - begin]
    return end - begin
