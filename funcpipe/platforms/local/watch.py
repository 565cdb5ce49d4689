"""Waiting for a file without polling: Linux reports by inotify what happens in a folder."""

import contextlib
import ctypes
import errno
import os
import select
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator

_COMES_OR_GOES = 0x80 | 0x100 | 0x400 | 0x800  # IN_MOVED_TO, IN_CREATE, IN_DELETE_SELF, IN_MOVE_SELF
_READ_BYTES = 64 * 1024
_CANCEL_S = 0.1  # pause between checks for cancellation


class FolderWatch:
    """Wakes the threads of this process when something comes into a folder that they watch.

    One of those that wait reads the system's events and wakes the others; each looks for its own file. The C library is
    called directly: the package inotify_simple looks it up in a process of its own first, which takes every function
    some 15 ms where this takes 2.
    """

    available = sys.platform == "linux"

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        self._close = weakref.finalize(self, os.close, self._queue)
        self._poll = select.poll()
        self._poll.register(self._queue, select.POLLIN)
        self._changed = threading.Condition()
        self._users: Counter[int] = Counter()
        self._news = 0
        self._has_reader = False

    def wait(self, path: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause until the file `path` is there, `timeout_s` are over or `cancel` is set."""
        ends_s = time.monotonic() + timeout_s

        def over() -> bool:
            return os.path.exists(path) or cancel.is_set() or time.monotonic() >= ends_s

        while not over():
            folder = _deepest_folder(path)
            with contextlib.suppress(FileNotFoundError), self._watching(folder) as (watch, seen):
                while not over() and _deepest_folder(path) == folder and self._is_watched(folder, watch):
                    seen = self._wait_for_news(seen, ends_s, cancel)

    @contextlib.contextmanager
    def _watching(self, folder: str) -> Iterator[tuple[int, int]]:
        """Watch `folder`; yields the number of the watch, and how much news there was before.

        The end of a watch is an event, too: a thread that goes on waiting has to watch anew.
        """
        with self._changed:
            watch = self._add(folder)
            self._users[watch] += 1
            seen = self._news
        try:
            yield watch, seen
        finally:
            with self._changed:
                self._users[watch] -= 1
                self._end_unused(watch)

    def _is_watched(self, folder: str, watch: int) -> bool:
        """Return True if `watch` is that of `folder`, still: not of one of that name which has gone."""
        with self._changed:
            now = self._add(folder)
            self._end_unused(now)
            return now == watch

    def _add(self, folder: str) -> int:
        return self._checked(self._libc.inotify_add_watch(self._queue, os.fsencode(folder), _COMES_OR_GOES))

    def _end_unused(self, watch: int) -> None:
        if not self._users[watch]:
            del self._users[watch]
            self._libc.inotify_rm_watch(self._queue, watch)  # fails where the folder is gone, and the watch too

    def _wait_for_news(self, seen: int, ends_s: float, cancel: threading.Event) -> int:
        """Pause until there is more news than was `seen`; returns how much there is."""
        with self._changed:
            while self._news == seen and not cancel.is_set():
                left_s = min(ends_s - time.monotonic(), _CANCEL_S)
                if left_s <= 0:
                    break
                if self._has_reader:
                    self._changed.wait(left_s)
                else:
                    self._read(left_s)
            return self._news

    def _read(self, timeout_s: float) -> None:
        """Read the news, without holding the lock meanwhile, and wake those who wait."""
        self._has_reader, came = True, False
        self._changed.release()
        try:
            came = bool(self._poll.poll(timeout_s * 1000))
            if came:
                os.read(self._queue, _READ_BYTES)
        finally:
            self._changed.acquire()
            self._has_reader = False
            self._news += came
            self._changed.notify_all()

    def _checked(self, result: int) -> int:
        if result >= 0:
            return result
        number = ctypes.get_errno()
        if number in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(number, os.strerror(number))
        raise OSError(number, f"folders cannot be watched: {os.strerror(number)}")


def _deepest_folder(path: str) -> str:
    """Return the folder nearest to `path`, of those that it lies in, that exists."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
