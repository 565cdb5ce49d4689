"""Nothing that others put into a folder leads requests out of it."""

from pathlib import Path

import pytest

from funcpipe.errors import StorageError
from funcpipe.platforms.local.files import FileStorage


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a secret, beside the storage's."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("42")
    return tmp_path / "outside"


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path, outside: Path) -> None:
    storage = FileStorage(tmp_path / "objects")
    storage.put("run-1/a", b"1")
    (tmp_path / "objects" / "run-1" / "linked").symlink_to(outside)
    for act in (
        lambda: storage.get("run-1/linked/secret"),
        lambda: storage.put("run-1/linked/new", b"2"),
        lambda: storage.delete("run-1/linked/secret"),
        lambda: storage.list("run-1/linked/"),
    ):
        with pytest.raises(StorageError, match="link"):
            act()
    assert [file.name for file in outside.iterdir()] == ["secret"]
    assert storage.list("run-1/") == ("run-1/a", "run-1/linked")


def test_a_link_to_a_file_is_not_read_and_not_written_through(tmp_path: Path, outside: Path) -> None:
    storage = FileStorage(tmp_path / "objects")
    (tmp_path / "objects" / "a").symlink_to(outside / "secret")
    with pytest.raises(StorageError):
        storage.get("a")
    storage.put("a", b"1")
    assert (storage.get("a"), (outside / "secret").read_text()) == (b"1", "42")


@pytest.mark.parametrize("prefix", ["../", "../outside/s", "run-1/../../outside/", "/etc/"])
def test_no_listing_leaves_the_folder(tmp_path: Path, outside: Path, prefix: str) -> None:
    with pytest.raises(StorageError, match="no key"):
        FileStorage(tmp_path / "objects").list(prefix)


def test_the_folder_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage = FileStorage(tmp_path / "link")
    storage.put("run-1/a", b"1")
    assert storage.list("run-1/") == ("run-1/a",)
    assert storage.get("run-1/a") == b"1"
