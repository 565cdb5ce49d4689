"""Small documents in the storage: JSON text, and a checksum of it on a line of its own.

{"format": "funcpipe.hand-over/1", "step": 12}
1d0a2f64c8d0a7b3
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from funcpipe.core import from_text, to_text
from funcpipe.core.json_form import Document
from funcpipe.errors import CorruptMessage, FormatError, KeyMissing
from funcpipe.platforms.base import Storage, batches

_log = logging.getLogger(__name__)

READS = 6
"""The reads of an object before it counts as damaged, or as missing where it must exist."""

POLL_S = 0.2
"""Pause between two polls for a document that another process will write, where storage does not notify."""

_FEW, _AT_ONCE = 8, 64
"""So many requests are made one after the other; more of them side by side, up to that number."""

D = TypeVar("D", bound=Document)
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def side_by_side(ask: Callable[[Asked], Answer], of: Sequence[Asked]) -> list[Answer]:
    """Return what `ask` returns for each, in order; many are asked for in threads."""
    if len(of) <= _FEW:
        return [ask(one) for one in of]
    with ThreadPoolExecutor(min(len(of), _AT_ONCE), thread_name_prefix="funcpipe-read") as pool:
        return list(pool.map(ask, of))


def encode_document(value: Document) -> bytes:
    """Return `value` as the bytes of a document."""
    text = to_text(value, indent=None).encode()
    return text + f"{xxhash.xxh3_64_hexdigest(text)}\n".encode()


def decode_document(kind: type[D], data: bytes, *, source: str) -> D:
    """Return the inverse of `encode_document`. Raises CorruptMessage, which names `source`, for anything else."""
    text, _, checksum = data.removesuffix(b"\n").rpartition(b"\n")
    text += b"\n"
    if xxhash.xxh3_64_hexdigest(text).encode() != checksum:
        raise CorruptMessage(f"{source}: wrong checksum; the document is truncated or was changed in transit")
    try:
        return from_text(kind, text, source=source)
    except FormatError as error:
        raise CorruptMessage(str(error)) from error


def put_document(storage: Storage, key: str, value: Document, *, if_absent: bool = False) -> None:
    """Write `value` under `key`; with `if_absent`, raises KeyExists if something is there."""
    storage.put(key, encode_document(value), if_absent=if_absent)


def get_document(storage: Storage, kind: type[D], key: str) -> D:
    """Return the document under `key`. Raises KeyMissing, or CorruptMessage if it stays damaged when read again."""
    for read in range(1, READS):
        try:
            return decode_document(kind, storage.get(key), source=key)
        except CorruptMessage as error:
            _log.warning("read %d of %d is damaged, reading again: %s", read, READS, error)
    return decode_document(kind, storage.get(key), source=key)


def find_document(storage: Storage, kind: type[D], key: str) -> D | None:
    """Return the document under `key`, or None if there is none. Raises CorruptMessage as `get_document` does."""
    try:
        return get_document(storage, kind, key)
    except KeyMissing:
        return None


def exists(storage: Storage, key: str) -> bool:
    """Return True if there is an object under `key`, even one that cannot be read."""
    try:
        storage.get(key)
    except KeyMissing:
        return False
    except CorruptMessage as error:
        _log.warning("an object that cannot be read is there all the same: %s", error)
    return True


def find_readable_document(storage: Storage, kind: type[D], key: str) -> D | None:
    """The document under `key`, or None if there is none, or none that can be read: for what a run can do without."""
    try:
        return find_document(storage, kind, key)
    except CorruptMessage as error:
        _log.warning("does without an object that cannot be read: %s", error)
        return None


def get_listed_document(storage: Storage, kind: type[D], key: str) -> D:
    """Return the document under a key that was listed, so must exist: a read that does not find it is repeated."""
    for _ in range(READS - 1):
        try:
            return get_document(storage, kind, key)
        except KeyMissing:
            _log.debug("%s was listed, but a read did not find it; reading again", key)
    return get_document(storage, kind, key)


def readable_documents(storage: Storage, kind: type[D], keys: Iterable[str]) -> Iterator[D]:
    """Yield the documents under keys that were listed, without those that are damaged or have gone since."""

    def read(key: str) -> D | None:
        try:
            return get_listed_document(storage, kind, key)
        except (CorruptMessage, KeyMissing) as error:
            _log.warning("does without an object that cannot be read: %s", error)
            return None

    for batch in batches(tuple(keys)):
        yield from (document for document in side_by_side(read, batch) if document is not None)
