"""Requests of storages: bodies as the files that HTTP clients read them from, and the deletion of many objects."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from funcpipe.errors import StorageBusy, StorageError
from funcpipe.platforms.base import Gate

MOST_BYTES = 5 * 2**30
"""The most that one put takes: docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html, and PutObject of OSS."""

_BLOCK_BYTES = 1024 * 1024  # more than clients ask for: fewer calls for the same bytes


class GatedBody:
    """Bytes that are read while `gate` is held: from the first read until nothing is left, or the context ends."""

    def __init__(self, data: bytes | memoryview, gate: Gate) -> None:
        self._data = memoryview(data).cast("B")
        self._gate = gate
        self._held = False
        self._position = 0

    def read(self, size: int | None = -1) -> bytes | memoryview:
        """Return the next bytes, in blocks that may be larger than `size` where not all are asked for."""
        if self._position >= len(self._data):
            self._leave()
            return b""
        if not self._held:
            self._gate.__enter__()
            self._held = True
        length = len(self._data) if size is None or size < 0 else max(size, _BLOCK_BYTES)
        block = self._data[self._position : self._position + length]
        self._position += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to `offset` from the beginning, from here or from the end."""
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def __len__(self) -> int:
        return len(self._data)

    def __enter__(self) -> "GatedBody":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._held:
            self._held = False
            self._gate.__exit__(None, None, None)


def require_one_put(where: str, data: bytes | memoryview, *, most_bytes: int = MOST_BYTES) -> None:
    """Raise StorageError if `data` is more than a service takes at once, before any of it is sent."""
    size = memoryview(data).nbytes
    if size > most_bytes:
        raise StorageError(
            f"{where}: an object of {size} bytes is larger than the {most_bytes} that one put may hold; more stages, "
            "or smaller micro-batches, make smaller objects"
        )


def delete_each(delete: Callable[[str], None], keys: Sequence[str], *, at_once: int = 1) -> None:
    """Call `delete` for all `keys`, so many at once, also after one has failed; raises as `raise_errors` does."""

    def error_of(key: str) -> StorageError | None:
        try:
            delete(key)
        except StorageError as error:
            return error
        return None

    if at_once == 1:
        errors = [error_of(key) for key in keys]
    else:
        with ThreadPoolExecutor(at_once) as pool:
            errors = list(pool.map(error_of, keys))
    raise_errors([error for error in errors if error is not None], len(keys))


def raise_errors(errors: Sequence[StorageError], objects: int) -> None:
    """Raise what kept some of `objects` objects from being deleted; StorageBusy if all of it may pass."""
    if not errors:
        return
    lasting = [error for error in errors if not isinstance(error, StorageBusy)]
    kind = StorageError if lasting else StorageBusy
    first = (lasting or errors)[0]
    raise kind(f"{len(errors)} of {objects} objects could not be deleted: {first}") from first
