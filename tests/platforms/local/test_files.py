import errno
import os
import threading
from pathlib import Path

import pytest

from funcpipe.errors import InvalidValue, StorageError
from funcpipe.platforms.local.files import FileStorage, FolderWatch


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
