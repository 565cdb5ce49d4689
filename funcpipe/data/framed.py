"""Files of framed items, as MosaicML Streaming and LitData write them: a count, offsets, then the items' bytes.

::

    uint32 items | uint32 offsets[items + 1] | item 0 | item 1 | …
"""

import json
import mmap
import struct
from pathlib import Path
from typing import Any

from funcpipe.errors import DataError, KeyMissing
from funcpipe.platforms.base import Storage

INDEX = "index.json"


class FramedFile:
    """The items of one file, mapped into memory: it stays readable after the file has been removed."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (self._items,) = struct.unpack_from("<I", self._bytes)

    def __len__(self) -> int:
        return int(self._items)

    def __getitem__(self, number: int) -> bytes:
        begin, end = struct.unpack_from("<2I", self._bytes, 4 * (1 + number))
        return self._bytes[begin:end]


def load_index(storage: Storage, url: str, key: str, wanted: str) -> dict[str, Any]:
    """The JSON object `key` below `url`. Raises DataError, which says what was `wanted`, if it is not one."""
    try:
        found = json.loads(storage.get(key))
    except KeyMissing:
        raise DataError(f"{url}: there is no {key}; {wanted}") from None
    except ValueError as error:
        raise DataError(f"{url}: {key} is not JSON: {error}; {wanted}") from error
    if not isinstance(found, dict):
        raise DataError(f"{url}: {key} is a {type(found).__name__}, not an object; {wanted}")
    return found
