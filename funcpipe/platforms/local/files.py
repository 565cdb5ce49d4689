"""Objects as files of one folder, shared by the processes of a machine."""

import itertools
import logging
import os
import threading
from functools import cached_property
from pathlib import Path

from funcpipe.errors import InvalidValue, KeyExists, KeyMissing, StorageError
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.local.watch import FolderWatch

_log = logging.getLogger(__name__)
_UNFINISHED = ".unfinished"
_LOOK_S = 0.01  # between two looks for an object, where the system does not tell of it


class FileStorage:
    """Keys are paths below `root`. An object is written beside its place and moved there whole.

    Raises InvalidValue where the folder cannot be made.
    """

    def __init__(self, root: str | Path) -> None:
        self.watches = FolderWatch.available
        self._root = os.path.abspath(root)
        self._numbers = itertools.count()
        self._unfinished = os.path.join(self._root, _UNFINISHED)
        try:
            os.makedirs(self._unfinished, exist_ok=True)
        except OSError as error:
            raise InvalidValue(
                "storage", self._root, f"must be a folder that can be written ({error.strerror})"
            ) from error

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        path = self._path(key)
        unfinished = os.path.join(self._unfinished, f"{os.getpid()}-{next(self._numbers)}")
        try:
            with gate, open(unfinished, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(data).cast("B"))
            self._move(unfinished, path, replace=not if_absent)
        except FileExistsError:
            raise KeyExists(key) from None
        except OSError as error:
            raise StorageError(f"the object {key!r} cannot be written: {error.strerror}") from error
        finally:
            _remove(unfinished)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """The bytes [start, stop) of an object; raises KeyMissing."""
        try:
            with open(self._path(key), "rb") as file, gate:
                file.seek(start)
                return file.read() if stop is None else file.read(max(stop - start, 0))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise KeyMissing(key) from None
        except OSError as error:
            raise StorageError(f"the object {key!r} cannot be read: {error.strerror}") from error

    def delete(self, key: str) -> None:
        """Remove an object, and the folders that it leaves empty; a missing key is not an error."""
        path = self._path(key)
        _remove(path)
        folder = os.path.dirname(path)
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty, or gone already
            folder = os.path.dirname(folder)

    def list(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        keys = []
        top = os.path.join(self._root, os.path.dirname(prefix))
        for folder, folders, names in os.walk(top):
            if _UNFINISHED in folders:
                folders.remove(_UNFINISHED)
            for name in names:
                key = os.path.relpath(os.path.join(folder, name), self._root)
                if key.startswith(prefix):
                    keys.append(key)
        return tuple(sorted(keys))

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause until the object is there, `timeout_s` are over or `cancel` is set."""
        path = self._path(key)
        try:
            if self.watches:
                self._watch.wait(path, timeout_s, cancel)
                return
        except OSError as error:
            self.watches = False
            _log.warning("folders are looked at every %g s instead of watched: %s", _LOOK_S, error)
        cancel.wait(min(timeout_s, _LOOK_S))

    @cached_property
    def _watch(self) -> FolderWatch:
        return FolderWatch()

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if any(part in ("", ".", "..", _UNFINISHED) for part in parts) or "\0" in key:
            raise StorageError(f"{key!r} is no key: it must be a relative path without empty, '.' or '..' parts")
        return os.path.join(self._root, *parts)

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
        raise StorageError(f"the folder of {path} vanishes again and again")


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        return
