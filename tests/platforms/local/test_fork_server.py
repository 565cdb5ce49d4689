"""Hosts are forked from one process for all that have the same environment, and know what the client knows then."""

import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from funcpipe.platforms.base import State
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.fork_server import fork_host
from funcpipe.platforms.local.platform import LocalPlatform, local_functions, preload_functions
from tests.platforms.local.test_local import ended, functions, sleep, succeed, worker
from tests.support.processes import children, hosts_of, runs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")


LOOKED_UP = tempfile.gettempdir()


def tell(payload: str) -> None:
    """Write where this function is, and what it finds there."""
    folder = Path(json.loads(payload)["storage"])
    told = {"here": os.getcwd(), "variable": os.environ.get("FUNCPIPE_TEST_TOLD"), "path": sys.path[-1]}
    (folder / "told").write_text(json.dumps(told))


def server() -> int:
    """The process that the only host of this one was forked from."""
    (host,) = hosts_of(os.getpid())
    (found,) = [pid for pid in children(os.getpid()) if host in children(pid)]
    return found


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of its own: servers of other tests are not these."""
    monkeypatch.setenv("OF_THIS_TEST", "1")


def run_of(platform: LocalPlatform) -> None:
    assert ended(platform, platform.invoke(worker())).state is State.DONE


@pytest.mark.usefixtures("variable")
def test_hosts_that_follow_each_other_and_run_at_once_are_forked_from_one_process() -> None:
    with functions(succeed) as platform:
        run_of(platform)
        first = server()
    with functions(succeed) as platform:
        run_of(platform)
        assert server() == first
        with functions(succeed) as beside:
            run_of(beside)
            assert len(hosts_of(os.getpid())) == len(children(first)) == 2
        run_of(platform)


@pytest.mark.usefixtures("variable")
def test_a_host_has_the_folder_variables_and_path_of_its_client_at_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("FUNCPIPE_TEST_TOLD", name)
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
        with local_functions(load_spec("local"), f"{__name__}:tell") as platform:
            assert ended(platform, platform.invoke(worker(folder=folder))).state is State.DONE
        told = json.loads((folder / "told").read_text())
        assert told == {"here": str(folder), "variable": name, "path": str(folder)}


def say(listener: int, file: str) -> None:
    """Write which process this one was forked from, and where its temporary files go."""
    Path(file).write_text(f"{os.getppid()} {tempfile.gettempdir()}")


@pytest.mark.usefixtures("variable")
def test_temporary_files_go_where_the_client_has_them_at_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has looked that up when it loaded this module."""
    servers = set[str]()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(folder))
        with open(os.devnull, "r+b") as nowhere, socket.socket() as listener:
            fork_host(
                f"{__name__}:say",
                str(folder / "told"),
                streams=(nowhere.fileno(), nowhere.fileno(), nowhere.fileno()),
                listener=listener.fileno(),
                preload=(__name__,),
                environment=os.environ,
            ).wait()
        server, _, temporary = (folder / "told").read_text().partition(" ")
        servers.add(server)
        assert temporary == str(folder)
    assert len(servers) == 1


@pytest.mark.usefixtures("variable")
def test_where_another_variable_has_changed_another_server_is_started_and_the_idle_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with functions(sleep) as platform:
        handle = platform.invoke(worker())
        first = server()
        monkeypatch.setenv("OF_THIS_TEST", "2")
        with functions(succeed) as other:
            run_of(other)
        assert runs(first), "it has a host"
        assert platform.status(handle).state is State.RUNNING
    monkeypatch.setenv("OF_THIS_TEST", "3")
    with functions(succeed) as platform:
        run_of(platform)
        assert server() != first
    assert not runs(first)


@pytest.mark.usefixtures("variable")
def test_a_server_loads_nothing_of_the_folder_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise AssertionError('taken for the one of Python')")
    monkeypatch.chdir(tmp_path)
    with functions(succeed) as platform:
        run_of(platform)


@pytest.mark.usefixtures("variable")
def test_a_server_that_is_not_needed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loads_for_ever.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.syspath_prepend(tmp_path)
    preload_functions(("loads_for_ever",))

    def loading() -> list[int]:
        return [pid for pid in children(os.getpid()) if "loads_for_ever" in Path(f"/proc/{pid}/cmdline").read_text()]

    wait_until(lambda: bool(loading()))
    monkeypatch.setenv("OF_THIS_TEST", "2")
    preload_functions(())
    assert not loading()


@pytest.mark.usefixtures("variable")
def test_a_server_that_was_killed_is_replaced() -> None:
    with functions(succeed) as platform:
        run_of(platform)
        first = server()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not runs(first))
    with functions(succeed) as platform:
        run_of(platform)
        assert server() != first


@pytest.mark.usefixtures("variable")
def test_what_cannot_be_preloaded_is_told_by_the_host(capfd: pytest.CaptureFixture[str]) -> None:
    entry = "tests.platforms.local.test_local:succeed"
    with (
        local_functions(load_spec("local"), entry, preload=("no_such_module",)) as platform,
        pytest.raises(Exception, match="there is no host of local functions at"),
    ):
        platform.invoke(worker())
    assert "No module named 'no_such_module'" in capfd.readouterr().err
