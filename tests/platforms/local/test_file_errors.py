"""Errors of the file system, raised where Linux raises them: which of them pass, and that none of them is hidden."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.base import Storage
from funcpipe.platforms.local import files
from funcpipe.platforms.local.files import FileStorage
from tests.retries import Pauses, retried

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
