"""Deleting many objects where that takes a request for each, and telling of those that stayed."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from funcpipe.errors import StorageBusy, StorageError


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
