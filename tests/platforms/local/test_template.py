"""Functions that are forked from a template, and how it is decided which are."""

import json
import os
import signal
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import FaultTolerance, WorkerSpec
from funcpipe.core.start import Readiness
from funcpipe.platforms.base import Invoked, State, Status
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.function import TEMPLATE
from funcpipe.platforms.local.platform import LocalPlatform, local_functions
from funcpipe.platforms.local.readiness import TRIES, StartChooser
from tests.platforms.local.test_local import ended, note, process, worker
from tests.support.processes import children, hosts_of, runs
from tests.support.waiting import wait_until

PLACE = "tests.platforms.local.test_template"
LOADED = [1.0]

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def entry(payload: str, invoked: Invoked) -> None:
    """Note how this function began, where it writes, and what it found loaded; what it changes there is its own."""
    invoked.start.end(0.0)
    found = invoked.template
    print(f"printed by {os.getpid()}")
    if isinstance(found, list):
        found[0] += 1.0
    note(payload, json.dumps([invoked.start.readiness.value, found, os.getpid(), tempfile.mkdtemp()]))
    if json.loads(payload)["attempt"] == 1:
        time.sleep(600)


def load(payload: str) -> object:
    assert json.loads(payload)["bundle_sha256"] == "0"
    return LOADED


def load_nothing(payload: str) -> object:
    raise ValueError("there is nothing")


def load_with_a_thread(payload: str) -> object:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return LOADED


def functions(name: str) -> AbstractContextManager[LocalPlatform]:
    return local_functions(load_spec("local"), f"{PLACE}:entry", load=f"{PLACE}:{name}")


def spec(folder: Path, attempt: int = 0) -> WorkerSpec:
    return replace(worker(folder, attempt=attempt), faults=FaultTolerance(lifetime_s=100.0))


def templates() -> list[int]:
    (host,) = hosts_of(os.getpid())
    return [pid for pid in children(host) if Path(f"/proc/{pid}/comm").read_text().strip() == TEMPLATE]


def begun(platform: LocalPlatform, folder: Path) -> list[object]:
    """What the next function notes, once it has ended."""
    (folder / "notes").unlink(missing_ok=True)
    assert ended(platform, platform.invoke(spec(folder))) == Status(state=State.DONE)
    found: list[object] = json.loads((folder / "notes").read_text())
    return found


def test_functions_after_the_first_are_forked_from_a_template_and_are_the_hosts_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with functions("load") as platform:
        assert begun(platform, tmp_path)[:2] == ["imported", None]
        wait_until(lambda: begun(platform, tmp_path)[0] == "template")
        (template,) = templates()
        handle = platform.invoke(spec(tmp_path, attempt=1))  # by the fewest tries, or by the least time
        wait_until(lambda: (tmp_path / "notes").read_text().count("\n") == 2)
        readiness, loaded, pid, folder = json.loads((tmp_path / "notes").read_text().splitlines()[-1])
        assert (pid, loaded) == (process(handle), [2.0] if readiness == "template" else None)
        assert Path(folder).exists()
        os.kill(pid, signal.SIGKILL)
        assert ended(platform, handle).reason == "killed by SIGKILL"
        assert not Path(folder).parent.exists()
    wait_until(lambda: not runs(template))
    assert f"printed by {pid}" in capfd.readouterr().out


def test_without_its_template_a_host_forks_functions_itself(tmp_path: Path) -> None:
    with functions("load") as platform:
        wait_until(lambda: begun(platform, tmp_path)[0] == "template")
        (template,) = templates()
        os.kill(template, signal.SIGKILL)
        assert begun(platform, tmp_path)[0] in ("imported", "template")  # it may just have been asked
        wait_until(lambda: not runs(template))
        assert [begun(platform, tmp_path)[0] for _ in range(2)] == ["imported", "imported"]
        assert templates() == []  # one that has ended is not made again


@pytest.mark.parametrize("name", ["load_nothing", "load_with_a_thread"])
def test_what_cannot_be_loaded_before_is_loaded_by_functions(tmp_path: Path, name: str) -> None:
    with functions(name) as platform:
        begun(platform, tmp_path)
        wait_until(lambda: templates() == [])
        assert [begun(platform, tmp_path)[0] for _ in range(3)] == ["imported"] * 3


def test_each_readiness_is_tried_a_few_times_and_then_the_one_that_takes_least() -> None:
    chooser, both = StartChooser(), (Readiness.IMPORTED, Readiness.TEMPLATE)
    assert chooser.choose(both[:1]) is Readiness.IMPORTED
    tried = [chooser.choose(both) for _ in range(2 * TRIES - 1)]
    assert sorted(one.value for one in (both[0], *tried)) == ["imported"] * TRIES + ["template"] * TRIES
    for readiness, seconds in zip(both, (0.2, 0.3), strict=True):
        for _ in range(TRIES):
            chooser.record(readiness, seconds)
    assert [chooser.choose(both) for _ in range(3)] == [Readiness.IMPORTED] * 3
    for _ in range(8):
        chooser.record(Readiness.IMPORTED, 0.5)  # the machine has become busy: only the last ones count
    assert chooser.choose(both) is Readiness.TEMPLATE
    assert chooser.choose(both[:1]) is Readiness.IMPORTED
