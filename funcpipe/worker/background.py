"""Small writes and deletions of a worker, done beside its lanes, which no task waits for."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs functions one after the other in a thread. An error is raised by the next call, or when the context ends."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="funcpipe-background")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self.flush()

    def flush(self) -> None:
        """Wait until everything that was submitted is done."""
        for future in self._pending:
            future.result()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` after what was submitted before."""
        for future in [future for future in self._pending if future.done()]:
            self._pending.remove(future)
            future.result()
        self._pending.append(self._thread.submit(work))
