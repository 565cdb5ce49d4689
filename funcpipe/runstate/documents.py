"""Small documents in the storage: JSON, and a checksum on a line of its own behind it."""

from typing import TypeVar

import xxhash

from funcpipe.core import from_text, to_text
from funcpipe.core.json_form import Document
from funcpipe.errors import CorruptMessage, FormatError, KeyMissing
from funcpipe.platforms.base import Storage

_READS = 6  # of a document whose bytes are not what was written

D = TypeVar("D", bound=Document)


def encode(value: Document) -> bytes:
    """`value` as the bytes of a note."""
    text = to_text(value).encode()
    return text + f"{xxhash.xxh3_64_hexdigest(text)}\n".encode()


def decode(kind: type[D], data: bytes, *, source: str) -> D:
    """The inverse; raises CorruptMessage, with `source`, unless the bytes are a whole note of that kind."""
    text, _, checksum = data.removesuffix(b"\n").rpartition(b"\n")
    text += b"\n"
    if xxhash.xxh3_64_hexdigest(text).encode() != checksum:
        raise CorruptMessage(f"{source}: the checksum is wrong: truncated, or changed on its way")
    try:
        return from_text(kind, text, source=source)
    except FormatError as error:
        raise CorruptMessage(str(error)) from error


def put_document(storage: Storage, key: str, value: Document, *, if_absent: bool = False) -> None:
    """Write `value` under `key`."""
    storage.put(key, encode(value), if_absent=if_absent)


def get_listed_document(storage: Storage, kind: type[D], key: str) -> D:
    """The note under a key that is known to exist: a read that does not find it is made again."""
    for _ in range(_READS - 1):
        try:
            return get_document(storage, kind, key)
        except KeyMissing:
            continue
    return get_document(storage, kind, key)


def get_document(storage: Storage, kind: type[D], key: str) -> D:
    """The note under `key`; raises KeyMissing, or CorruptMessage if it is still wrong when read again."""
    for _ in range(_READS - 1):
        try:
            return decode(kind, storage.get(key), source=key)
        except CorruptMessage:
            continue
    return decode(kind, storage.get(key), source=key)
