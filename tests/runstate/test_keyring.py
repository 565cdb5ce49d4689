"""Where the keys of runs are kept, who may read them, and how another machine gets to know one."""

import os
import stat
from pathlib import Path

import pytest

from funcpipe.core.run_key import RunKey
from funcpipe.errors import InvalidValue
from funcpipe.runstate.generations import delete_generation, delete_objects, reserve_generation
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import FOLDER, RUN_KEY, KeyFolder, signed
from funcpipe.testing.memory_storage import MemoryStorage


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of keys of this machine, which does not exist yet; nothing is told in the environment."""
    monkeypatch.delenv(RUN_KEY)
    monkeypatch.setenv(FOLDER, str(tmp_path / "state" / "keys"))
    return tmp_path / "state" / "keys"


def kept() -> tuple[Keys, RunKey]:
    run_key = RunKey.new()
    keys = Keys("run-1", 0, run_key.fingerprint)
    KeyFolder().keep(keys, run_key)
    return keys, run_key


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_may_read_a_key(folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        keys, run_key = kept()
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert (mode(folder), mode(file)) == (0o700, 0o600)
    assert file.name == f"run-1.0000-{keys.nonce}"
    assert file.read_text() == f"{run_key.text}\n"
    assert KeyFolder().find(keys) == run_key


def test_a_key_is_found_by_its_generation_alone(folder: Path) -> None:
    keys, run_key = kept()
    for other in (Keys("run-2", 0, keys.nonce), Keys("run-1", 1, keys.nonce), Keys("run-1"), Keys("run-1", 0, "0a")):
        assert KeyFolder().find(other) is None
    assert KeyFolder(folder).find(keys) == run_key


def test_a_file_with_another_key_tells_none(folder: Path) -> None:
    keys, _ = kept()
    (file,) = folder.iterdir()
    file.write_text(RunKey.new().text)
    assert KeyFolder().find(keys) is None
    file.write_text("no key")
    with pytest.raises(InvalidValue, match="run key must be 64 hexadecimal digits"):
        KeyFolder().find(keys)


def test_a_key_that_is_kept_is_never_replaced(folder: Path) -> None:
    keys, run_key = kept()
    with pytest.raises(FileExistsError):
        KeyFolder().keep(keys, RunKey.new())
    assert KeyFolder().find(keys) == run_key


def test_keys_go_with_their_generations(folder: Path) -> None:
    storage = signed(MemoryStorage())
    first, second = reserve_generation(storage, "run-1"), reserve_generation(storage, "run-1")
    other = reserve_generation(storage, "run-10")
    assert len(list(folder.iterdir())) == 3
    delete_generation(storage, first)
    assert [KeyFolder().find(keys) is None for keys in (first, second, other)] == [True, False, False]
    delete_objects(storage, "run-1")
    assert [KeyFolder().find(keys) is None for keys in (first, second, other)] == [True, True, False]
    delete_objects(storage, "run-1")
    assert len(list(folder.iterdir())) == 1


def test_another_machine_is_told_the_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, run_key = kept()
    monkeypatch.setenv(FOLDER, str(tmp_path / "another machine"))
    assert KeyFolder().find(keys) is None
    monkeypatch.setenv(RUN_KEY, f" {run_key.text}\n")
    assert KeyFolder().find(keys) == run_key
    assert KeyFolder().find(Keys("run-1", 1, "0a")) is None  # of one run alone
    monkeypatch.setenv(RUN_KEY, "no key")
    with pytest.raises(InvalidValue, match="run key must be 64 hexadecimal digits"):
        KeyFolder().find(keys)


def test_without_a_folder_of_its_own_keys_lie_where_programs_keep_their_state(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    kept()
    monkeypatch.delenv("XDG_STATE_HOME")
    kept()
    assert len(list((tmp_path / "xdg/funcpipe/keys").iterdir())) == 1
    assert len(list((tmp_path / "home/.local/state/funcpipe/keys").iterdir())) == 1
