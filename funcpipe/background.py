"""What a worker does beside its lanes: small writes and deletions that no task waits for."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from funcpipe.core import to_text
from funcpipe.core.json_form import Document
from funcpipe.platforms.base import Storage


class Background:
    """Does one thing after the other in another thread; an error is raised by the next call, or at the end."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="funcpipe-background")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            for future in self._pending:
                future.result()

    def put(self, key: str, value: Document) -> None:
        """Write the JSON of `value`."""
        self._submit(lambda: self._storage.put(key, to_text(value).encode()))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        for key in keys:
            self._submit(lambda key=key: self._storage.delete(key))  # type: ignore[misc]

    def _submit(self, work: Callable[[], None]) -> None:
        for future in [future for future in self._pending if future.done()]:
            self._pending.remove(future)
            future.result()
        self._pending.append(self._thread.submit(work))
