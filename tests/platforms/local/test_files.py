"""Errors of the file system, raised where Linux raises them: which of them pass, and that none of them is hidden."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from funcpipe.errors import InvalidValue, KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.base import Storage
from funcpipe.platforms.local import files
from funcpipe.platforms.local.files import FileStorage, FolderWatch
from tests.retries import Pauses, retried
from tests.support.waiting import LONG_S


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/.", ".unfinished/x", "a\0b"])
def test_keys_cannot_leave_the_folder(tmp_path: Path, key: str) -> None:
    store = FileStorage(tmp_path)
    for work in (lambda: store.put(key, b""), lambda: store.get(key), lambda: store.delete(key)):
        with pytest.raises(StorageError, match="is no key"):
            work()


def test_nothing_is_left_of_what_was_deleted(tmp_path: Path) -> None:
    store = FileStorage(tmp_path)
    store.put("run/a/b", b"1")
    store.put("run/c", b"1")
    store.delete("run/a/b")
    store.delete("run/c")
    assert [path for path, _, files in os.walk(tmp_path) if files] == []
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InvalidValue, match=r"must be a folder that can be written .Not a directory., got .*file/objects"
    ):
        FileStorage(tmp_path / "file" / "objects")


def test_a_folder_that_cannot_be_watched_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: FolderWatch, folder: str) -> int:
        raise OSError(errno.ENOSPC, "folders cannot be watched: no watches are left")

    monkeypatch.setattr(FolderWatch, "_add", refuse)
    store = FileStorage(tmp_path)
    store.wait("run/a", 20.0, threading.Event())
    assert not store.watches
    assert "polled every 0.01 s instead of watched: [Errno 28] folders cannot be watched" in caplog.text


PASSING = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE)
LASTING = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

CALLS: dict[str, tuple[str, Callable[[Storage], object]]] = {
    "open to write": ("open", lambda store: store.put("run/k", b"2")),
    "write": ("write", lambda store: store.put("run/k", b"2")),
    "move": ("replace", lambda store: store.put("run/k", b"2")),
    "link": ("link", lambda store: store.put("run/new", b"2", if_absent=True)),
    "open to read": ("open", lambda store: store.get("run/k")),
    "remove": ("remove", lambda store: store.delete("run/k")),
    "remove many": ("remove", lambda store: store.delete_many(["run/k", "run/l"])),
    "list": ("scandir", lambda store: store.list("run/")),
}


class Disk:
    """Lets the system calls `call` fail with `number`, so many `times`; and all that clean up, for as long."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, number: int, times: int = 1) -> None:
        self._number = number
        self.left = times
        owner: Any = files if call == "open" else os
        real = open if call == "open" else getattr(os, call)
        patch.setattr(owner, call, self._failing(real, spend=True), raising=False)
        if call != "remove":
            patch.setattr(os, "remove", self._failing(os.remove, spend=False))

    def _failing(self, real: Callable[..., Any], *, spend: bool) -> Callable[..., Any]:
        def call(*values: Any, **options: Any) -> Any:
            if self.left <= 0:
                return real(*values, **options)
            self.left -= spend
            raise OSError(self._number, os.strerror(self._number))

        return call


@pytest.fixture
def store(tmp_path: Path) -> FileStorage:
    made = FileStorage(tmp_path)
    made.put("run/k", b"1")
    return made


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_trouble_that_may_pass_is_told_as_such_and_outlasted(
    store: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    name, request = CALLS[call]
    with monkeypatch.context() as patch:
        disk = Disk(patch, name, number)
        with pytest.raises(StorageBusy) as busy:
            request(store)
        assert disk.left == 0
        assert os.strerror(number) in str(busy.value)
        assert str(tmp_path / "run") in str(busy.value)
        assert "check the disk" in str(busy.value)
    assert store.get("run/k") == b"1"  # the request had no effect
    with monkeypatch.context() as patch:
        Disk(patch, name, number, times=12)
        request(retried(store, deadline_s=60.0, pauses=Pauses()))
    store.put("last", b"")
    assert os.listdir(tmp_path / ".unfinished") == []


@pytest.mark.parametrize("number", LASTING, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_trouble_that_stays_is_told_at_once(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    name, request = CALLS[call]
    disk = Disk(monkeypatch, name, number, times=100)
    with pytest.raises(StorageError, match="check the folder and its permissions") as refused:
        request(retried(store))
    assert not isinstance(refused.value, StorageBusy | KeyMissing | KeyExists)
    assert disk.left >= 98  # it was not tried again


def test_a_folder_within_that_cannot_be_read_is_not_taken_for_an_empty_one(
    store: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir
    store.put("run/a/b/c", b"1")

    def scandir(path: str) -> Any:
        if str(path).rstrip("/").endswith("run/a/b"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for prefix in ("", "run/", "run/a/b/"):
        with pytest.raises(StorageBusy, match=r"Input/output error .EIO."):
            store.list(prefix)
    assert store.list("other/") == store.list("run/k/") == ()


def test_many_objects_are_deleted_although_one_of_them_cannot_be(
    store: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("run/a", "run/z"):
        store.put(key, b"")
    real = os.remove

    def remove(path: str) -> None:
        if path.endswith("run/k"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        real(path)

    monkeypatch.setattr(os, "remove", remove)
    with pytest.raises(StorageError, match=r"1 of 3 objects could not be deleted: cannot remove .*/run/k: Permission"):
        store.delete_many(["run/a", "run/k", "run/z"])
    assert store.list("") == ("run/k",)


def test_a_function_may_start_while_its_disk_is_in_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "makedirs", refuse)
        store = FileStorage(tmp_path / "new")
        with pytest.raises(StorageBusy, match="Read-only file system"):
            store.put("k", b"1")
    store.put("k", b"1")
    assert store.get("k") == b"1"


pytestmark = pytest.mark.skipif(not FolderWatch.available, reason=f"{sys.platform} does not tell what comes")


class Counting(FolderWatch):
    """Counts how often it is told something."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0

    def _read(self, timeout_s: float) -> None:
        before = self._news
        super()._read(timeout_s)
        self.told += self._news - before


@pytest.mark.parametrize("waiting", [1, 2])
def test_other_files_disturb_once_each(tmp_path: Path, waiting: int) -> None:
    watch, cancel = Counting(), threading.Event()
    folders = [tmp_path / str(i) for i in range(waiting)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(waiting) as pool:
        waits = [pool.submit(watch.wait, str(folder / "mine"), 20, cancel) for folder in folders]
        for number in range(5):
            for folder in folders:
                (folder / f"other {number}").touch()
            cancel.wait(0.05)
        for folder in folders:
            (folder / "mine").touch()
        for wait in waits:
            wait.result()
    assert watch.told <= 6 * waiting + waiting  # and what watches say when they end


def test_a_folder_that_comes_and_goes_is_watched_when_it_is_there(tmp_path: Path) -> None:
    watch, cancel = Counting(), threading.Event()
    path = tmp_path / "a" / "b" / "mine"
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(watch.wait, str(path), 20, cancel)
        for _ in range(3):
            path.parent.mkdir(parents=True)
            cancel.wait(0.02)
            path.parent.rmdir()
            path.parent.parent.rmdir()
        path.parent.mkdir(parents=True)
        os.replace(_new(tmp_path / "unfinished"), path)
        wait.result()
    assert path.exists()


class Renewing(FolderWatch):
    """Something comes into the folder that is watched; after that news it is another one of the same name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.renewed = threading.Event()

    def _read(self, timeout_s: float) -> None:
        before = self._news
        if not self.renewed.is_set():
            (self.folder / "other").touch()
        super()._read(timeout_s)
        if self._news > before and not self.renewed.is_set():
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            self.renewed.set()


def test_a_folder_that_is_made_anew_is_watched_anew(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    watch, cancel = Renewing(folder), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(watch.wait, str(folder / "mine"), 600, cancel)
        try:
            assert watch.renewed.wait(LONG_S)
            cancel.wait(0.3)  # what was told of the old folder has been read
            (folder / "mine").touch()
            wait.result(timeout=LONG_S)
        finally:
            cancel.set()


def test_a_wait_can_be_cancelled_and_ends_in_time(tmp_path: Path) -> None:
    watch, cancel = FolderWatch(), threading.Event()
    watch.wait(str(tmp_path / "mine"), 0.01, cancel)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(watch.wait, str(tmp_path / "mine"), 600, cancel)
        cancel.set()
        wait.result()
    assert not (tmp_path / "mine").exists()


def _new(path: Path) -> Path:
    path.touch()
    return path
