"""Shards of MosaicML Streaming (MDS): read without its library, which asks for older numpy, transformers and xxhash.

A sample is its columns, one after the other, those of variable size with their sizes (uint32) in front.
"""

import bz2
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from funcpipe.data.shard_format import INDEX, FramedFile, SampleReader, Shard, load_index, missing_package
from funcpipe.errors import DataError
from funcpipe.platforms.base import Storage

_WANTED = "give the folder that streaming.MDSWriter has written (its `out`), one split of it"
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_ARRAY_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""Types by the number in front of an array whose column does not give its type."""

Decode = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsFormat:
    """The columns of all shards: names, encodings, and sizes in bytes where they are fixed."""

    names: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()
    sizes: tuple[int | None, ...] = ()

    def index(self, storage: Storage, url: str) -> tuple[Sequence[Shard], "MdsFormat"]:
        """The shards by `index.json`; raises DataError for columns that cannot be read, such as pickles."""
        listed = load_index(storage, url, INDEX, _WANTED).get("shards")
        if not isinstance(listed, list) or any(entry.get("format") != "mds" for entry in listed):
            raise DataError(f"{url}: {INDEX} is not of shards in the format mds; {_WANTED}")
        if not listed:
            return (), self
        columns = {
            (tuple(entry["column_names"]), tuple(entry["column_encodings"]), tuple(entry["column_sizes"]))
            for entry in listed
        }
        if len(columns) > 1:
            raise DataError(f"{url}: its shards have {len(columns)} different sets of columns; write them with one")
        ((names, encodings, sizes),) = columns
        found = replace(self, names=names, encodings=encodings, sizes=sizes)
        for name, encoding in zip(names, encodings, strict=True):
            _decoder(name, encoding)
        return [_shard(entry) for entry in listed], found

    def fetch(self, storage: Storage, shard: Shard, target: Path) -> None:
        """Download a shard, and decompress it."""
        data = storage.get(shard.key)
        target.write_bytes(_decompressed(data, shard.note, shard.local_bytes) if shard.note else data)

    def reader(self, path: Path, shard: Shard) -> SampleReader:
        """Return a reader of its samples, as dictionaries by the names of columns."""
        decoders = [_decoder(name, encoding) for name, encoding in zip(self.names, self.encodings, strict=True)]
        return _Samples(FramedFile(path), self.names, decoders, self.sizes)


class _Samples:
    def __init__(
        self, items: FramedFile, names: Sequence[str], decoders: Sequence[Decode], sizes: Sequence[int | None]
    ) -> None:
        self._items, self._names, self._decoders, self._fixed = items, names, decoders, sizes
        self._variable = struct.Struct(f"<{sum(not size for size in sizes)}I")

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        data = self._items[number]
        variable, begin = iter(self._variable.unpack_from(data)), self._variable.size
        sample = {}
        for name, decode, fixed in zip(self._names, self._decoders, self._fixed, strict=True):
            end = begin + (fixed or next(variable))
            sample[name] = decode(data[begin:end])
            begin = end
        return sample


def _shard(entry: dict[str, Any]) -> Shard:
    raw, packed = entry["raw_data"], entry["zip_data"]
    codec = (entry["compression"] or "").partition(":")[0] if packed else ""
    return Shard(key=(packed or raw)["basename"], samples=entry["samples"], local_bytes=raw["bytes"], note=codec)


def _decompressed(data: bytes, codec: str, raw_bytes: int) -> bytes:
    match codec:
        case "gz":
            return gzip.decompress(data)
        case "bz2":
            return bz2.decompress(data)
        case "zstd" | "br" | "snappy":
            try:
                import pyarrow
            except ImportError as error:
                raise missing_package(error, "parquet") from error
            name = "brotli" if codec == "br" else codec
            return bytes(pyarrow.decompress(data, decompressed_size=raw_bytes, codec=name, asbytes=True))
        case _:
            raise DataError(f"shards compressed with {codec!r} cannot be read; write them with zstd, gz, bz2 or none")


def _decoder(name: str, encoding: str) -> Decode:
    """Return the decoder of a column; raises DataError for an encoding that is unknown, or that could run code."""
    kind, _, rest = encoding.partition(":")
    simple: dict[str, Decode] = {
        "bytes": bytes,
        "str": lambda data: data.decode(),
        "int": lambda data: int.from_bytes(data, "little", signed=True),
        "str_int": lambda data: int(data.decode()),
        "str_float": lambda data: float(data.decode()),
        "json": json.loads,
        "jpeg": _image,
        "png": _image,
    }
    if kind in simple and not rest:
        return simple[kind]
    if kind in _SCALARS and not rest:
        return lambda data: np.frombuffer(data, kind)[0]
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        return _Array(dtype, tuple(int(size) for size in shape.split(",")) if shape else None)
    raise DataError(
        f"column {name!r} is encoded as {encoding!r}, which is not read here; encodings that are: "
        f"{', '.join(simple)}, ndarray, {', '.join(_SCALARS)}"
    )


@dataclass(frozen=True, slots=True)
class _Array:
    """An array, with its type and shape in front where the column does not say them."""

    dtype: str
    shape: tuple[int, ...] | None

    def __call__(self, data: bytes) -> Any:
        place, dtype, shape = 0, self.dtype, self.shape
        if not dtype:
            dtype, place = _ARRAY_TYPES[data[0]], 1
        if shape is None:
            dimensions, size_of_one = data[place] >> 2, 1 << data[place] % 4
            sizes = data[place + 1 : (end := place + 1 + dimensions * size_of_one)]
            shape, place = tuple(np.frombuffer(sizes, f"<u{size_of_one}").tolist()), end
        return np.frombuffer(data, dtype, offset=place).reshape(shape).copy()  # torch wants it writable


def _image(data: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("Pillow is not installed, which images need; run: pip install pillow") from error
    return Image.open(BytesIO(data))
