import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from funcpipe.core import Plan, ScheduleKind, Stage, Sync, Wire, WorkerSpec
from funcpipe.errors import InvalidValue, PlatformError
from funcpipe.platforms.base import Cause, Handle, Platform, State, Status
from funcpipe.platforms.catalog import load_spec, open_platform
from funcpipe.platforms.function_group import stop_functions
from funcpipe.platforms.local.platform import LocalPlatform, local_functions
from tests.support.processes import hosts_of, runs
from tests.support.waiting import LONG_S, wait_until

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def succeed(payload: str) -> None:
    assert json.loads(payload)["run"] == "run-1"
    print("all is well")


def fail(payload: str) -> None:
    raise SystemExit(3)


def fall(payload: str) -> None:
    raise ValueError("as it should")


def collect_garbage(payload: str) -> None:
    gc.collect()


def sleep(payload: str) -> None:
    time.sleep(600)


def leave_files(payload: str) -> None:
    """Write where temporary files go, say where that is, and end as the worker is called."""
    folder = tempfile.mkdtemp()
    Path(folder, "file").write_bytes(b"left")
    child = subprocess.run([sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"], stdout=subprocess.PIPE)
    note(payload, f"{folder} {child.stdout.decode()}")
    if json.loads(payload)["attempt"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def start_a_child(payload: str) -> None:
    """Leave a process behind, which says who it is."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(payload, f"child {child.pid}")


def succeed_twice(payload: str) -> None:
    """Invoke a successor, which notes who it is and sleeps a moment; then end."""
    spec = json.loads(payload)
    if spec["attempt"] == 0:
        successor = worker(folder=Path(spec["storage"]), platform=spec["platform"], attempt=1)
        handle = open_platform(spec["platform"]).invoke(successor)
        note(payload, f"invoked {handle.name}")
    else:
        note(payload, f"process {os.getpid()}")
        time.sleep(0.5)
        note(payload, "done")


def note(payload: str, text: str) -> None:
    with open(Path(json.loads(payload)["storage"]) / "notes", "a") as file:
        file.write(text + "\n")


def notes(folder: Path, count: int) -> list[str]:
    """The notes of functions, once there are so many."""
    path = folder / "notes"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return path.read_text().splitlines()


def worker(folder: Path = Path("/nowhere"), platform: str = "", attempt: int = 0) -> WorkerSpec:
    plan = Plan(
        global_batch=1,
        micro_batch=1,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=(Stage(first=0, stop=1, size="1024MB", memory_mb=1024),),
    )
    return WorkerSpec(
        run="run-1",
        attempt=attempt,
        stage=0,
        replica=0,
        plan=plan,
        storage=str(folder),
        platform=platform,
        bundle="b",
        bundle_sha256="0",
        parameters="p",
        epochs=1,
        seed=0,
        message_deadline_s=1.0,
    )


def functions(entry: Callable[[str], None]) -> AbstractContextManager[LocalPlatform]:
    return local_functions(load_spec("local"), f"tests.platforms.local.test_local:{entry.__name__}")


def ended(platform: Platform, handle: Handle) -> Status:
    wait_until(lambda: platform.status(handle).state is not State.RUNNING)
    return platform.status(handle)


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (succeed, Status(state=State.DONE)),
        (fail, Status(state=State.FAILED, reason="ended with exit code 3", cause=Cause.EXITED)),
        (fall, Status(state=State.FAILED, reason="ended with exit code 1", cause=Cause.EXITED)),
    ],
)
def test_a_function_gets_its_payload_and_its_end_is_seen(
    entry: Callable[[str], None], status: Status, capfd: pytest.CaptureFixture[str]
) -> None:
    with functions(entry) as platform:
        assert platform.spec == load_spec("local")
        assert ended(platform, platform.invoke(worker())) == status
    out, errors = capfd.readouterr()
    assert ("all is well" in out) == (entry is succeed)
    assert ("ValueError: as it should" in errors) == (entry is fall)


def test_functions_do_not_complain_of_what_their_host_was_doing(capfd: pytest.CaptureFixture[str]) -> None:
    with functions(collect_garbage) as platform:
        other = LocalPlatform(platform.url)
        assert other.spec == platform.spec  # so that its connection is open, and waited for by the host
        assert ended(platform, platform.invoke(worker())) == Status(state=State.DONE)
    assert capfd.readouterr().err == ""


def test_what_silent_functions_print_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    entry = f"tests.platforms.local.test_local:{succeed.__name__}"
    with local_functions(load_spec("local"), entry, silent=True) as platform:
        assert ended(platform, platform.invoke(worker())) == Status(state=State.DONE)
    assert capfd.readouterr().out == ""


def test_a_killed_function_is_named_with_its_signal_and_stop_returns_when_it_has_ended() -> None:
    with functions(sleep) as platform:
        handle, other = platform.invoke(worker()), platform.invoke(worker())
        assert handle.name != other.name
        assert platform.status(handle) == Status(state=State.RUNNING)
        os.kill(process(handle), signal.SIGKILL)
        killed = Status(state=State.FAILED, reason="killed by SIGKILL", cause=Cause.CRASHED)
        assert ended(platform, handle) == killed
        platform.stop(other)
        assert not runs(process(other))
        platform.stop(other)
        platform.stop(handle)
        assert platform.status(other) == Status(state=State.FAILED, reason="stopped")
        assert platform.status(handle) == killed


def process(handle: Handle) -> int:
    return int(handle.name.split()[-1])


def test_functions_end_with_the_context_and_so_do_the_processes_that_they_started(tmp_path: Path) -> None:
    with functions(sleep) as platform:
        handle = platform.invoke(worker())
        url = platform.url
    assert not runs(process(handle))
    gone = open_platform(url)
    with pytest.raises(PlatformError, match="there is no host of local functions at local:///"):
        gone.invoke(worker())
    assert stop_functions(gone, [handle])  # and says nothing of money that it may still cost
    with functions(start_a_child) as platform:
        ended(platform, platform.invoke(worker(folder=tmp_path)))
        (line,) = notes(tmp_path, 1)
        wait_until(lambda: not runs(int(line.split()[-1])))


def test_temporary_files_of_a_function_are_deleted_when_it_ends_however_it_ends(tmp_path: Path) -> None:
    with functions(leave_files) as platform:
        for attempt, state in enumerate((State.DONE, State.FAILED)):
            handle = platform.invoke(worker(folder=tmp_path, attempt=attempt))
            assert ended(platform, handle).state is state
        folders = [Path(folder) for folder in (tmp_path / "notes").read_text().split()]
        assert len(set(folders)) == 4
        assert not any(folder.exists() or folder.parent.exists() for folder in folders)


def test_another_process_s_handle_and_many_threads_are_served() -> None:
    with functions(sleep) as platform:
        handle = platform.invoke(worker())
        other = open_platform(platform.url)
        assert other.spec == platform.spec
        with ThreadPoolExecutor(8) as pool:
            states = list(pool.map(lambda n: (platform, other)[n % 2].status(handle).state, range(200)))
        assert set(states) == {State.RUNNING}
        stopping = threading.Thread(target=other.stop, args=(handle,))
        stopping.start()
        assert ended(platform, handle).reason == "stopped"
        stopping.join(timeout=LONG_S)
        assert not stopping.is_alive()
        with pytest.raises(PlatformError, match="never started 'function 9, process 1'"):
            platform.status(Handle(worker="s0.r0", name="function 9, process 1"))


def test_a_function_may_start_its_successor(tmp_path: Path) -> None:
    with functions(succeed_twice) as platform:
        handle = platform.invoke(worker(folder=tmp_path, platform=platform.url))
        assert ended(platform, handle).state is State.DONE
        noted = dict(line.partition(" ")[::2] for line in notes(tmp_path, 3))  # in any order
        successor = Handle(worker="s0.r0", name=noted["invoked"])
        assert process(successor) == int(noted["process"])
        assert ended(platform, successor).state is State.DONE


def test_functions_that_are_detached_outlive_their_client_and_their_host_ends_with_the_last(tmp_path: Path) -> None:
    with functions(succeed_twice) as platform:
        platform.invoke(worker(folder=tmp_path, platform=platform.url))
        (host,) = hosts_of(os.getpid())
        platform.detach()
    assert "done" in notes(tmp_path, 3)
    wait_until(lambda: not runs(host))


def end_children(payload: str) -> None:
    """Note what becomes of a process that is started, and of one that is forked, when it is asked to end."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    ready, begun = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(begun, b"1")
        time.sleep(600)
    os.read(ready, 1)
    for child in (started, forked):
        os.kill(child, signal.SIGTERM)
        note(payload, f"child ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    time.sleep(600)


def test_signals_to_end_leave_functions_to_their_client_and_end_what_nobody_looks_after(tmp_path: Path) -> None:
    with functions(end_children) as platform:
        handle = platform.invoke(worker(tmp_path))
        function, (host,) = process(handle), hosts_of(os.getpid())
        assert notes(tmp_path, 2) == [f"child ended with {-signal.SIGTERM}"] * 2
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for pid in (function, host):
                os.kill(pid, number)
        assert platform.status(handle).state is State.RUNNING  # as the host answers, which has not ended either
        assert runs(function)
        platform.detach()

    def ask() -> bool:
        """As the host may not have seen yet that its client has ended."""
        with suppress(ProcessLookupError):
            os.kill(host, signal.SIGTERM)
        return not runs(function) and not runs(host)

    wait_until(ask)


def test_a_host_that_cannot_load_the_functions_code_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        local_functions(load_spec("local"), "nowhere:main") as platform,
        pytest.raises(PlatformError, match="there is no host of local functions at"),
    ):
        platform.invoke(worker())
    assert "No module named 'nowhere'" in capfd.readouterr().err


@pytest.mark.parametrize("url", ["local://host/socket", "local:", "mars://x"])
def test_a_url_that_is_no_platform_s_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match=r"must be the URL of a|must be local, ray://…, or a deployment"):
        open_platform(url).invoke(worker())


def test_a_long_temporary_folder_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "deep" / ("d" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with functions(succeed) as platform:
        assert ended(platform, platform.invoke(worker())).state is State.DONE
    assert not any(deep.iterdir())


SCRIPT = """
import sys, time
from pathlib import Path
from tests.platforms.local.test_local import functions, sleep, worker
print("main runs", file=sys.stderr)
with functions(sleep) as platform:
    handle = platform.invoke(worker())
    print(handle.name.split()[-1], platform.url.removeprefix("local://").removesuffix("/socket"), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["client", "host"])
def test_functions_end_with_a_client_or_host_that_is_killed_and_do_not_run_its_script(
    tmp_path: Path, killed: str
) -> None:
    (tmp_path / "client.py").write_text(SCRIPT)
    client = subprocess.Popen(
        [sys.executable, str(tmp_path / "client.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    function, folder = client.stdout.readline().split()
    assert runs(int(function))
    (host,) = hosts_of(client.pid)
    os.kill(client.pid if killed == "client" else host, signal.SIGKILL)
    wait_until(lambda: not runs(int(function)) and not runs(host))
    client.kill()
    _, errors = client.communicate(timeout=LONG_S)
    assert errors.count("main runs") == 1
    assert Path(folder).exists() == (killed == "host")
