"""Datasets in shards for tests: the same samples in each format, and one of any size that is made up on demand.

Sample i has as `x` eight numbers that follow from i, as `y` a class of three.
"""

import io
import json
import random
import struct
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcpipe.errors import KeyMissing, StorageError
from funcpipe.platforms.base import OPEN, Gate

WIDTH = 8
CLASSES = 3

Features = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def features_of(index: int, width: int = WIDTH) -> Features:
    """The numbers of sample `index`."""
    return np.sin(np.arange(width, dtype=np.float32) * (index % 97 + 1))


def as_pair(sample: Mapping[str, Any]) -> tuple[Tensor, int]:
    """A sample of any of the formats as (x in double precision, y): what trains."""
    x = sample["npy"] if "npy" in sample else sample["x"]
    y = sample["cls"] if "cls" in sample else sample["y"]
    return torch.as_tensor(x, dtype=torch.float64), int(y)


def write_mds(folder: Path, samples: int, shard_samples: int) -> None:
    """As MosaicML Streaming's `MDSWriter` writes it."""
    sizes = [min(shard_samples, samples - first) for first in range(0, samples, shard_samples)]
    for number, size in enumerate(sizes):
        shard = mds_shard(range(number * shard_samples, number * shard_samples + size))
        (folder / mds_name(number)).write_bytes(shard)
    (folder / "index.json").write_text(mds_index(sizes))


def write_litdata(folder: Path, samples: int, shard_samples: int) -> None:
    """As LitData writes it."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=shard_samples)
    for index in range(samples):
        writer.add_item(index, {"x": torch.from_numpy(features_of(index)), "y": index % CLASSES})
    writer.done()
    writer.merge()


def write_parquet(folder: Path, samples: int, shard_samples: int) -> None:
    """Two files, with row groups of `shard_samples`, and a column that training does not need."""
    from pyarrow import Table
    from pyarrow.parquet import write_table

    middle = samples // shard_samples // 2 * shard_samples
    for number, indices in enumerate((range(middle), range(middle, samples))):
        rows = [
            {"x": features_of(index).tolist(), "y": index % CLASSES, "unused": random.Random(index).randbytes(1000)}
            for index in indices
        ]
        write_table(Table.from_pylist(rows), folder / f"part-{number}.parquet", row_group_size=shard_samples)


def write_webdataset(folder: Path, samples: int, shard_samples: int) -> None:
    """As WebDataset's `ShardWriter` writes it, with the index that `widsindex create` makes."""
    listed = []
    for first in range(0, samples, shard_samples):
        name, indices = f"shard-{first:06d}.tar", range(first, min(first + shard_samples, samples))
        with tarfile.open(folder / name, "w") as tar:
            for index in indices:
                array = io.BytesIO()
                np.save(array, features_of(index))
                _add(tar, f"{index:06d}.npy", array.getvalue())
                _add(tar, f"{index:06d}.cls", str(index % CLASSES).encode())
        listed.append({"url": name, "nsamples": len(indices), "filesize": (folder / name).stat().st_size})
    index_text = json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": listed})
    (folder / "index.json").write_text(index_text)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


WRITERS: dict[str, Callable[[Path, int, int], None]] = {
    "mds": write_mds,
    "litdata": write_litdata,
    "parquet": write_parquet,
    "webdataset": write_webdataset,
}
"""By the name of the factory that reads what each writes."""


def mds_name(number: int) -> str:
    """What a shard of MDS is called."""
    return f"shard.{number:05d}.mds"


def mds_shard(indices: Sequence[int], width: int = WIDTH) -> bytes:
    """A shard of MDS with the samples `indices`."""
    items = [features_of(index, width).tobytes() + struct.pack("<q", index % CLASSES) for index in indices]
    first, size = 4 * (len(items) + 2), 4 * width + 8
    offsets = [first + size * number for number in range(len(items) + 1)]
    return struct.pack(f"<{len(items) + 2}I", len(items), *offsets) + b"".join(items)


def mds_index(sizes: Sequence[int], width: int = WIDTH) -> str:
    """The index of shards of MDS of so many samples."""
    columns = {
        "column_names": ["x", "y"],
        "column_encodings": [f"ndarray:float32:{width}", "int"],
        "column_sizes": [4 * width, 8],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": None,
        "version": 2,
        "zip_data": None,
    }
    size = 4 * width + 8
    return json.dumps(
        {
            "version": 2,
            "shards": [
                {
                    **columns,
                    "raw_data": {"basename": mds_name(number), "bytes": 8 + (4 + size) * count, "hashes": {}},
                    "samples": count,
                }
                for number, count in enumerate(sizes)
            ],
        }
    )


class MadeUpShards:
    """A storage with a dataset of MDS of any size, of which nothing lies anywhere: each object is made when it is read.

    `shards` shards of `shard_samples` samples of `width` numbers each.
    """

    watches = False

    def __init__(self, shards: int, shard_samples: int, width: int) -> None:
        self._shards, self._shard_samples, self._width = shards, shard_samples, width

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """The bytes [start, stop) of an object; raises KeyMissing."""
        return self._object(key)[start:stop]

    def list(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        keys = ["index.json", *map(mds_name, range(self._shards))]
        return tuple(sorted(key for key in keys if key.startswith(prefix)))

    def etags(self, prefix: str) -> dict[str, str]:
        """The keys that begin with `prefix`; no object ever changes."""
        return dict.fromkeys(self.list(prefix), "")

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Nothing can be written: StorageError."""
        raise StorageError(f"{key} cannot be written: this storage is made up")

    def delete(self, key: str) -> None:
        """Nothing can be removed: StorageError."""
        raise StorageError(f"{key} cannot be removed: this storage is made up")

    def delete_many(self, keys: Sequence[str]) -> None:
        """Nothing can be removed: StorageError."""
        self.delete(keys[0])

    def touch(self, key: str) -> None:
        """Nothing, as each object is made when it is read."""
        self._object(key)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause for `timeout_s`, or until `cancel` is set."""
        cancel.wait(timeout_s)

    def _object(self, key: str) -> bytes:
        if key == "index.json":
            return mds_index([self._shard_samples] * self._shards, self._width).encode()
        number = key.removeprefix("shard.").removesuffix(".mds")
        if not number.isdigit() or mds_name(int(number)) != key or int(number) >= self._shards:
            raise KeyMissing(key)
        first = int(number) * self._shard_samples
        return mds_shard(range(first, first + self._shard_samples), self._width)
