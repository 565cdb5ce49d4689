"""The last backward of a step in a thread of its own, so that gradients travel while it still computes others."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class BackwardThread:
    """Runs `compute`, a backward, and lets other threads wait for what it has completed so far."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self._compute = compute
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="funcpipe-backward", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Return once the backward has ended, even with an error."""
        self._thread.join()

    def wait_for(self, complete: Callable[[], bool]) -> bool:
        """Wait until `complete()` or the end of the backward; true if it has ended. Raises the backward's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or complete())
            if not self._ended:
                return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the objects of `wait_for` change within this context; those who wait check again when it ends."""
        with self._changed:
            yield
            self._changed.notify_all()

    def _run(self) -> None:
        torch.get_num_threads()  # makes torch apply its number of threads to this thread too
        try:
            self._compute()
        except BaseException as error:  # noqa: BLE001 - raised where the end is waited for
            self._error = error
        finally:
            with self.updating():
                self._ended = True
