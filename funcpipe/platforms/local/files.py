"""Objects as files of one folder, shared by the processes of a machine."""

import contextlib
import ctypes
import errno
import io
import itertools
import logging
import os
import select
import stat
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from funcpipe.core.cached import cached_property
from funcpipe.errors import InvalidValue, KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.shared.objects import delete_each

_log = logging.getLogger(__name__)

_UNFINISHED = ".unfinished"
_POLL_S = 0.01  # between two polls for an object, where the system does not notify

_LASTING = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP),
        *(errno.ENOTDIR, errno.EISDIR, errno.EFBIG, errno.ENOSYS, errno.ENOTSUP),
    }
)
"""Errors that stay. All others, such as a full, read-only or unreachable disk, may pass."""

_COMES_OR_GOES = 0x80 | 0x100 | 0x400 | 0x800  # IN_MOVED_TO, IN_CREATE, IN_DELETE_SELF, IN_MOVE_SELF
_READ_BYTES = 64 * 1024
_CANCEL_S = 0.1  # pause between checks for cancellation

_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""There is no object of that name; it, or what it begins with, may be that of a folder or of another object."""


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


class FileStorage:
    """Keys are paths below `root`. An object is written beside its place and moved there whole.

    Links that others put into the folder are not followed: none leads a request out of it.
    Raises InvalidValue where the folder cannot be made. Every request is made once: a failure that may pass is
    StorageBusy, for others to try again.
    """

    def __init__(self, root: str | Path) -> None:
        self.watches = FolderWatch.available
        self._root = os.path.realpath(root)
        self._numbers = itertools.count()
        self._unfinished = os.path.join(self._root, _UNFINISHED)
        self._leftovers: list[str] = []
        try:
            os.makedirs(self._unfinished, exist_ok=True)
        except OSError as error:
            if error.errno in _LASTING or isinstance(error, FileExistsError):
                raise InvalidValue(
                    "storage", self._root, f"must be a folder that can be written ({error.strerror})"
                ) from error
            _log.warning("the folder %s cannot be made for now: %s", self._root, error.strerror)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        path = self._path(key)
        with self._errors_of("write", path), self._unfinished_file() as (unfinished, file):
            with gate:
                _write_all(file.fileno(), memoryview(data).cast("B"))
            file.close()  # which may report that not all could be written
            try:
                self._move(unfinished, path, replace=not if_absent)
            except FileExistsError:
                raise KeyExists(key) from None

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing."""
        path = self._path(key)
        with self._errors_of("read", path):
            try:
                with open(path, "rb", opener=_open_no_link) as file, gate:
                    file.seek(start if start >= 0 else max(os.fstat(file.fileno()).st_size + start, 0))
                    return file.read() if stop is None else file.read(max(stop - start, 0))
            except _ABSENT:
                raise KeyMissing(key) from None

    def delete(self, key: str) -> None:
        """Remove an object, and the folders that it leaves empty; a missing key is not an error."""
        path = self._path(key)
        with self._errors_of("remove", path):
            try:
                os.remove(path)
            except _ABSENT:
                return
        folder = os.path.dirname(path)
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty, or gone already; and an empty folder is no object
            folder = os.path.dirname(folder)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; missing keys are not an error."""
        delete_each(self.delete, keys)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""
        folder = os.path.dirname(prefix)
        if folder:
            self._path(f"{folder}/any")
        with self._errors_of("list", os.path.join(self._root, folder)):
            below = f"{folder}/" if folder else ""
            return tuple(sorted(key for key in self._below(below) if key.startswith(prefix)))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, with the time and the number of their files: each put makes one."""
        found = {}
        for key in self.list(prefix):
            path = self._path(key)
            with self._errors_of("list", path), contextlib.suppress(*_ABSENT):
                file = os.lstat(path)
                found[key] = f"{file.st_mtime_ns}.{file.st_ino}"
        return found

    def touch(self, key: str) -> None:
        """Give a file the time of now; raises KeyMissing."""
        path = self._path(key)
        with self._errors_of("touch", path):
            try:
                with open(path, "rb", opener=_open_no_link) as file:
                    os.utime(file.fileno())
            except _ABSENT:
                raise KeyMissing(key) from None

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause until the object is there, `timeout_s` are over or `cancel` is set."""
        path = self._path(key)
        try:
            if self.watches:
                self._watch.wait(path, timeout_s, cancel)
                return
        except OSError as error:
            self.watches = False
            _log.warning("folders are polled every %g s instead of watched: %s", _POLL_S, error)
        cancel.wait(min(timeout_s, _POLL_S))

    def _below(self, prefix: str) -> Iterator[str]:
        """Yield all keys below the folder `prefix`. What vanishes meanwhile is left out, any other error is raised."""
        try:
            with os.scandir(os.path.join(self._root, prefix)) as found:
                entries = [(f"{prefix}{entry.name}", entry.is_dir(follow_symlinks=False)) for entry in found]
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, is_folder in entries:
            if not is_folder:
                yield name
            elif name != _UNFINISHED:
                yield from self._below(f"{name}/")

    @cached_property
    def _watch(self) -> FolderWatch:
        return FolderWatch()

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if any(part in ("", ".", "..", _UNFINISHED) for part in parts) or "\0" in key:
            raise StorageError(f"{key!r} is no key: it must be a relative path without empty, '.' or '..' parts")
        folder = self._root
        for part in parts[:-1]:
            folder = f"{folder}/{part}"
            try:
                mode = os.lstat(folder).st_mode
            except OSError:
                break  # it is made, or missed, with what lies in it
            if stat.S_ISLNK(mode):
                raise StorageError(f"{folder} leads through a link, which is not followed; remove the link")
        return "/".join((self._root, *parts))

    @contextlib.contextmanager
    def _unfinished_file(self) -> Iterator[tuple[str, io.FileIO]]:
        """The path of a new file, and the file; it is removed at the end, unless it was moved to its place."""
        with contextlib.suppress(IndexError):  # another thread may take them
            for _ in range(len(self._leftovers)):
                self._discard(self._leftovers.pop(0))
        path = os.path.join(self._unfinished, f"{os.getpid()}-{next(self._numbers)}")
        if not os.path.isdir(self._unfinished):
            os.makedirs(self._unfinished, exist_ok=True)
        try:
            with open(path, "wb", buffering=0) as file:
                yield path, file
        finally:
            self._discard(path)

    def _discard(self, unfinished: str) -> None:
        """Remove an unfinished file, if it is there; if that fails, it is tried again at the next put."""
        try:
            os.remove(unfinished)
        except FileNotFoundError:
            return
        except OSError as error:
            self._leftovers.append(unfinished)
            _log.debug("%s cannot be removed for now: %s", unfinished, error.strerror)

    @contextlib.contextmanager
    def _errors_of(self, work: str, path: str) -> Iterator[None]:
        """Errors of the file system become ours: those that may pass StorageBusy, with what would help."""
        try:
            yield
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "unknown error")
            text = f"cannot {work} {path}: {error.strerror} ({name})"
            if error.errno in _LASTING:
                raise StorageError(f"{text}; check the folder and its permissions") from error
            raise StorageBusy(f"{text}; check the disk: its space, its mount and its health") from error

    def _move(self, unfinished: str, path: str, *, replace: bool) -> None:
        for _ in range(100):  # a delete in another process may remove the folder between its making and its use
            try:
                if replace:
                    os.replace(unfinished, path)
                else:
                    os.link(unfinished, path)
                return
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
        raise StorageBusy(f"the folder of {path} vanishes again and again")


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _deepest_folder(path: str) -> str:
    """Return the folder nearest to `path`, of those that it lies in, that exists."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
