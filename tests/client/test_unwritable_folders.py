"""A home that cannot be written, or none at all, as in containers: what can be done without, and what to set."""

import logging
import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from funcpipe.core.process import temporary_folder
from funcpipe.core.run_key import RunKey
from funcpipe.errors import InputError
from funcpipe.neighbours.history.journal import append, filing, history_file, read_history
from funcpipe.platforms.local.output import CLIENT, FunctionOutput, keep_client_log, log_file
from funcpipe.runstate.generations import reserve_generation
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import KeyFolder, signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.neighbours.history.observations import observation

_VARIABLES = (
    *("FUNCPIPE_KEY_DIR", "FUNCPIPE_LOG_DIR", "FUNCPIPE_HISTORY", "FUNCPIPE_RUN_KEY", "XDG_STATE_HOME"),
    *("XDG_DATA_HOME", "HOME"),
)


def unwritable(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()  # for root too, a folder cannot be made below a file
    patch.setenv("HOME", str(tmp_path / "home"))


def missing(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    patch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture(params=[unwritable, missing], autouse=True)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    spoil: Callable[[Path, pytest.MonkeyPatch], None] = request.param
    spoil(tmp_path, monkeypatch)


def test_a_run_whose_key_cannot_be_kept_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    with pytest.raises(InputError, match=r"the key of run run-1 cannot be kept: .*set FUNCPIPE_KEY_DIR to a folder"):
        reserve_generation(signed(storage), "run-1")
    assert storage.list("") == ()
    monkeypatch.setenv("FUNCPIPE_KEY_DIR", str(tmp_path / "keys"))
    assert KeyFolder().find(reserve_generation(signed(storage), "run-1")) is not None


def test_a_key_in_the_environment_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    run_key = RunKey.new()
    keys = Keys("run-1", 0, run_key.fingerprint)
    assert KeyFolder().find(keys) is None
    monkeypatch.setenv("FUNCPIPE_RUN_KEY", run_key.text)
    assert KeyFolder().find(keys) == run_key
    KeyFolder().forget([keys])


def test_logs_are_done_without(caplog: pytest.LogCaptureFixture) -> None:
    with keep_client_log("run-1"):
        logging.getLogger("funcpipe").warning("it goes on")
    assert "the log of run run-1 is not kept: " in caplog.text
    assert "FUNCPIPE_LOG_DIR names another folder" in caplog.text
    assert "it goes on" in caplog.text
    output = FunctionOutput(run="run-1", worker="s0.r0", attempt=0)
    output.abandon()
    assert "the logs of functions are not kept" in str(output.trouble)
    assert "FUNCPIPE_LOG_DIR names another folder" in str(output.trouble)


def test_a_log_that_another_user_has_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path))
    log_file("run-1", CLIENT).mkdir()  # there is a folder for the run, and no file of it can be opened
    with keep_client_log("run-1"):
        pass
    assert "the log of run run-1 is not kept: " in caplog.text


def test_the_history_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    assert read_history() == ()
    caplog.clear()
    with filing("run mine"):
        append(history_file() or Path(), [observation()])
    assert "run mine is not in the history: " in caplog.text
    assert "FUNCPIPE_HISTORY names another file, or none if it is empty" in caplog.text


def test_temporary_folders_name_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.devnull)
    with pytest.raises(InputError, match=r"no temporary folder can be made: .*set TMPDIR"):
        temporary_folder()
