"""What local functions print and log is kept, in order, whoever reads it or not."""

import os
from pathlib import Path

import pytest

from funcpipe.client.prepare.session import open_local
from funcpipe.core import logs
from funcpipe.core.logs import PRINTED, merged
from funcpipe.platforms.base import State, Status
from funcpipe.platforms.catalog import load_spec, open_platform, open_storage
from funcpipe.platforms.local import output as log_files
from funcpipe.platforms.local.output import log_file, read_logs
from funcpipe.platforms.local.platform import local_functions
from tests.e2e import small
from tests.platforms.kept_logs import assert_logs_are_kept
from tests.platforms.local.test_local import ended, process, worker
from tests.support.processes import hosts_of
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(log_files.FOLDER, str(tmp_path / "logs"))
    return tmp_path / "logs"


@pytest.mark.parametrize("silent", [False, True])
def test_all_that_a_function_says_is_kept_and_shown_unless_silent(
    silent: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = "tests.platforms.local.talking:talk"
    with local_functions(load_spec("local"), entry, silent=silent) as platform:
        assert ended(platform, platform.invoke(worker())) == Status(state=State.DONE)
        assert list(platform.logs("run-2")) == []
    found = [(line.level, line.worker, line.attempt, line.text) for line in merged("run-1", platform.logs("run-1"))]
    assert sorted(found) == [  # what is printed is dated by its reader, which may be late
        ("INFO", "s0.r0", 0, f"funcpipe.core.logs: {logs.BEGINS}"),
        (PRINTED, "s0.r0", 0, "by a child"),
        (PRINTED, "s0.r0", 0, "no end"),
        (PRINTED, "s0.r0", 0, "to output"),
        ("WARNING", "s0.r0", 0, "funcpipe.core.logs: logged\n    in two lines"),
    ]
    out, errors = capfd.readouterr()
    assert out == ("" if silent else "to output\n")
    assert errors == ("" if silent else "by a child\nno end")


def test_a_killed_function_s_lines_are_there_and_how_it_ended() -> None:
    entry = "tests.platforms.local.talking:talk_and_hang"
    with local_functions(load_spec("local"), entry, silent=True) as platform:
        handle = platform.invoke(worker())
        wait_until(lambda: [line.text for line in merged("run-1", platform.logs("run-1"))] == ["before it is killed"])
        os.kill(process(handle), 9)
        ended(platform, handle)
    said = [(line.level, line.text) for line in merged("run-1", open_platform("local:").logs("run-1"))]
    assert said == [(PRINTED, "before it is killed"), ("ERROR", "the function was ended: killed by SIGKILL")]


def test_a_reader_that_is_slow_delays_the_function_and_not_its_host(folder: Path) -> None:
    """The host's output is a pipe that nobody reads for a while; it answers nevertheless, and nothing is lost."""
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    try:
        with local_functions(load_spec("local"), "tests.platforms.local.talking:shout") as platform:
            os.dup2(saved, 1)
            os.close(write)
            handle = platform.invoke(worker())
            wait_until(lambda: (folder / "run-1" / "s0.r0.a0.log").stat().st_size > 60_000)
            assert platform.status(handle).state is State.RUNNING  # the pipes are full
            with open(read, "rb") as lines:
                got = [lines.readline() for _ in range(20_000)]
            assert ended(platform, handle).state is State.DONE
    finally:
        os.close(saved)
    expected = [str(number) for number in range(20_000)]
    assert [line.decode().rstrip("\n") for line in got] == expected
    assert [line.text for line in merged("run-1", read_logs("run-1"))] == expected


def test_a_reader_that_has_gone_ends_neither_the_function_nor_its_log() -> None:
    read, write = os.pipe()
    saved = os.dup(1)
    os.dup2(write, 1)
    os.close(read)
    try:
        with local_functions(load_spec("local"), "tests.platforms.local.talking:shout") as platform:
            os.dup2(saved, 1)
            os.close(write)
            assert ended(platform, platform.invoke(worker())).state is State.DONE
    finally:
        os.close(saved)
    assert len(merged("run-1", read_logs("run-1"))) == 20_000


def test_a_process_that_a_function_left_prints_on_and_holds_up_nobody(folder: Path) -> None:
    entry = "tests.platforms.local.talking:start_one_that_prints_on"
    with local_functions(load_spec("local"), entry, silent=True) as platform:
        assert ended(platform, platform.invoke(worker())) == Status(state=State.DONE)
    assert "PRINT run=run-1 worker=s0.r0 attempt=0 begun" in (folder / "run-1" / "s0.r0.a0.log").read_text()


def test_a_host_holds_no_file_of_functions_that_have_ended() -> None:
    entry = "tests.platforms.local.test_local:succeed"
    with local_functions(load_spec("local"), entry, silent=True) as platform:
        assert ended(platform, platform.invoke(worker())).state is State.DONE
        (host,) = hosts_of(os.getpid())
        before = len(os.listdir(f"/proc/{host}/fd"))
        for _ in range(5):
            assert ended(platform, platform.invoke(worker())).state is State.DONE
        assert len(os.listdir(f"/proc/{host}/fd")) == before


def test_the_newest_runs_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "KEPT_RUNS", 3)
    for number in range(5):
        log_file(f"run-{number}", "s0.r0.a0").write_text("")
        os.utime(folder / f"run-{number}", (number, number))
    log_file("a/b", "s0.r0.a0").write_text("")
    assert sorted(path.name for path in folder.iterdir()) == ["a%2Fb", "run-3", "run-4"]
    assert [path.name for path in folder.parent.iterdir()] == ["logs"]
    assert list(read_logs("..")) == []


@pytest.mark.parametrize(("variables", "where"), [({"XDG_STATE_HOME": "{}/state"}, "state"), ({}, ".local/state")])
def test_logs_lie_where_programs_keep_their_state(
    variables: dict[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(log_files.FOLDER)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert log_file("r", "w") == tmp_path / where / "funcpipe" / "logs" / "r" / "w.log"


def test_where_no_log_can_be_kept_functions_run_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(log_files.FOLDER, str(tmp_path / "file"))
    entry = "tests.platforms.local.talking:shout"
    with local_functions(load_spec("local"), entry, silent=True) as platform:
        with pytest.warns(UserWarning, match="the logs of functions are not kept: .*Not a directory"):
            handle = platform.invoke(worker())
        assert ended(platform, handle).state is State.DONE
    with log_files.keep_client_log("run-1"):
        pass
    assert "the log of run run-1 is not kept" in caplog.text
    assert list(read_logs("run-1")) == []


def test_logs_of_runs_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path / "logs"))
    url = (tmp_path / "objects").as_uri()
    with open_local(silent=True) as platform:
        assert_logs_are_kept(platform, open_storage(url), url, plan=small.plan(1, 1), wait=lambda: None)
