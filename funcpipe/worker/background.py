"""What a worker does beside its lanes: small writes and deletions that no task waits for."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from funcpipe.core.json_form import Document
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import put_document


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
            self.flush()

    def flush(self) -> None:
        """Wait until all is done."""
        for future in self._pending:
            future.result()

    def put(self, key: str, value: Document) -> None:
        """Write `value` as a note."""
        self.run(lambda: put_document(self._storage, key, value))

    def run(self, work: Callable[[], None]) -> None:
        """Do `work`."""
        for future in [future for future in self._pending if future.done()]:
            self._pending.remove(future)
            future.result()
        self._pending.append(self._thread.submit(work))
