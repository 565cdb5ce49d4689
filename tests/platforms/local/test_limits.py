"""Control groups, on folders that look like the system's."""

import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import MB, FunctionSize, PlatformSpec, WorkerSpec
from funcpipe.core.json_form import to_plain
from funcpipe.errors import PlanError, PlatformError
from funcpipe.platforms.base import Cause, Invoked, State, Status
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.limits import PERIOD_US, Groups, ImposedLimits
from funcpipe.platforms.local.platform import LocalPlatform, local_functions
from funcpipe.platforms.local.throttle import Link
from tests.platforms.local.test_local import ended, sleep, worker
from tests.support.processes import runs
from tests.support.waiting import wait_until

groups = Groups()
memory_is_limited = pytest.mark.skipif(not groups.memory, reason="no control group for memory can be made here")
cpu_is_limited = pytest.mark.skipif(not groups.cpu, reason="no control group for processors can be made here")


def fill(payload: str) -> None:
    """Use more and more memory; the last note says how much there was, in bytes.

    A process of its own would have had the pages of files that its host has, too.
    """
    path, kept, step = Path(json.loads(payload)["run"]), [], 2 * MB
    while True:
        kept.append(b"x" * step)
        path.write_text(str(resident_bytes("self", "RssAnon") + resident_bytes(os.getppid(), "RssFile")))


def resident_bytes(process: int | str, kind: str) -> int:
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) * 1024


def burn(payload: str) -> None:
    """Compute for half a second; write what share of a processor there was."""
    began_s, cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() - began_s < 0.5:
        pass
    share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
    Path(json.loads(payload)["run"]).write_text(str(share))


def tell(payload: str, invoked: Invoked | None = None) -> None:
    told = json.loads(payload)
    if invoked is not None:
        told |= {"init_s": invoked.init_s, "start": to_plain(invoked.start.times)}
    Path(told["run"]).write_text(json.dumps(told))


def spec(**changes: object) -> PlatformSpec:
    size = FunctionSize(
        name="small", memory_mb=160, vcpu=0.3, upload_bytes_s=1e7, download_bytes_s=2e7, price_usd_s=1e-5
    )
    small = replace(load_spec("aws-lambda"), name="small", sizes=(size,), cold_start_s=0.0, latency_s=0.01)
    return replace(small, **changes)  # type: ignore[arg-type]


def job(folder: Path) -> WorkerSpec:
    plain = worker(folder)
    stage = replace(plain.plan.stages[0], size="small")
    return replace(plain, run=str(folder / "said"), storage=folder.as_uri(), plan=replace(plain.plan, stages=(stage,)))


def run(entry: Callable[[str], None], limits: PlatformSpec, folder: Path) -> Status:
    module = entry.__module__.removeprefix("tests.platforms.")
    with local_functions(limits, f"tests.platforms.{module}:{entry.__name__}", imposed=True) as platform:
        return ended(platform, platform.invoke(job(folder)))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = groups_left()  # an earlier session's, in a part of the hierarchy that is not swept
    yield
    assert list(tmp_path.glob("funcpipe-*")) == []
    wait_until(lambda: groups_left() <= before)  # other tests of this machine may be about to remove theirs


def groups_left() -> set[str]:
    """The control groups of processes that have ended."""
    folders = [f"{parent}/{name}" for parent, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    made = [re.fullmatch(r".*/funcpipe-(\d+)-\d+", folder) for folder in folders]
    return {match[0] for match in made if match is not None and not runs(int(match[1]))}


@memory_is_limited
def test_a_function_that_uses_more_memory_than_its_size_has_dies_of_it(tmp_path: Path) -> None:
    status = run(fill, spec(), tmp_path)
    assert (status.reason, status.cause) == ("out of memory: 160 MB", Cause.OUT_OF_MEMORY)
    assert status.peak_bytes == pytest.approx(160 * MB, rel=0.05)
    assert int((tmp_path / "said").read_text()) == pytest.approx(160 * MB, rel=0.05)


@cpu_is_limited
def test_a_function_has_no_more_of_a_processor_than_its_size(tmp_path: Path) -> None:
    assert run(burn, spec(), tmp_path).state is State.DONE
    assert 0 < float((tmp_path / "said").read_text()) < 0.3 * 1.2


def test_a_function_that_outlives_its_lifetime_is_killed(tmp_path: Path) -> None:
    status = run(sleep, spec(lifetime_s=0.2), tmp_path)
    assert status == Status(state=State.FAILED, reason="timed out after 0.2 s", cause=Cause.TIMED_OUT)


def test_a_function_sees_its_storage_over_its_link_and_starts_cold(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert run(tell, spec(cold_start_s=0.3), tmp_path).state is State.DONE
    assert time.monotonic() - began_s > 0.3
    link = Link(latency_s=0.01, upload_bytes_s=1e7, download_bytes_s=2e7)
    told = json.loads((tmp_path / "said").read_text())
    assert told["storage"] == link.on(tmp_path.as_uri())
    assert told["init_s"] == 0.3  # which is billed
    assert (told["start"]["readiness"], told["start"]["parts"]) == ("cold", {"interpreter": 0.3})


def test_a_payload_that_is_too_large_is_refused_before_a_function_starts(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"payload of worker s0\.r0 has \d+ bytes, more than the 100 that small takes"):
        run(tell, spec(max_payload_bytes=100), tmp_path)


def test_no_more_functions_run_at_once_than_the_platform_allows(tmp_path: Path) -> None:
    with local_functions(spec(max_functions=2), "tests.platforms.local.test_local:sleep", imposed=True) as platform:
        first = platform.invoke(job(tmp_path))
        platform.invoke(job(tmp_path))
        with pytest.raises(PlatformError, match="2 functions run, as many as small allows at once"):
            platform.invoke(job(tmp_path))
        platform.stop(first)
        platform.invoke(job(tmp_path))


def test_a_size_that_the_platform_does_not_have_is_refused(tmp_path: Path) -> None:
    with (
        local_functions(spec(), "tests.platforms.local.test_local:sleep", imposed=True) as platform,
        pytest.raises(PlatformError, match="size must be one of small, got '1024MB'"),
    ):
        platform.invoke(worker())


def test_what_cannot_be_imposed_is_said_once(tmp_path: Path) -> None:
    wide = replace(spec().sizes[0], vcpu=0.6 * len(os.sched_getaffinity(0)))
    with local_functions(spec(sizes=(wide,)), "tests.platforms.local.test_local:sleep", imposed=True) as platform:
        platform.invoke(job(tmp_path))
        with pytest.warns(UserWarning, match="functions with more vCPUs than the . processors of this machine"):
            platform.invoke(job(tmp_path))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            platform.invoke(job(tmp_path))


def test_limits_fall_back_where_no_group_can_be_made(tmp_path: Path) -> None:
    limits = ImposedLimits(spec(), str(tmp_path), Groups(mounts="", own=""), processors=2)
    function_limits = limits.of_function("small")
    function_limits.impose()
    assert [text.split(" is not")[0] for text in limits.warnings()] == [
        "the memory of small's functions",
        "the processor share of small's functions",
    ]
    crashed = Status(state=State.FAILED, reason="killed by SIGKILL", cause=Cause.CRASHED)
    assert function_limits.explain(crashed, late=False) == crashed
    limits.release(function_limits)
    limits.close()


def test_without_limits_a_function_may_have_any_size(tmp_path: Path) -> None:
    with local_functions(load_spec("local"), "tests.platforms.local.test_limits:tell") as platform:
        assert isinstance(platform, LocalPlatform)
        assert ended(platform, platform.invoke(job(tmp_path))).state is State.DONE
    assert json.loads((tmp_path / "said").read_text())["storage"] == tmp_path.as_uri()


MOUNTS_V1 = """\
31 23 0:28 / {root} rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / {root}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/1 {root}/memory rw,relatime - cgroup cgroup rw,memory
"""
OWN_V1 = """\
4:memory:/docker/1/job
1:cpu,cpuacct:/docker/1
0::/
"""
MOUNTS_V2 = "24 23 0:29 / {root} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OWN_V2 = "0::/user/session\n"

FILES_V1 = (
    "cgroup.procs",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
)
FILES_V2 = ("cgroup.procs", "memory.max", "memory.swap.max", "cpu.max")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that new folders get, as control groups do, but not those in `session`; both are removed together."""
    names: list[str] = []
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(self, mode, parents, exist_ok)
        for name in names if self.parent.name != "session" else ():
            (self / name).touch()

    def remove(self: Path) -> None:
        for file in self.iterdir():
            file.unlink()
        rmdir(self)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    return names


def test_a_group_of_version_1_lies_in_the_own_group_of_each_hierarchy(tmp_path: Path, files: list[str]) -> None:
    for place in ("memory/job", "cpu,cpuacct"):
        (tmp_path / place).mkdir(parents=True)
    files += FILES_V1
    groups = Groups(mounts=MOUNTS_V1.format(root=tmp_path), own=OWN_V1)
    assert groups.memory
    assert groups.cpu
    group = groups.make()
    group.limit_memory(10**9)
    group.limit_cpu(0.5)
    group.join()
    (memory,) = (tmp_path / "memory/job").glob("funcpipe-*")
    (cpu,) = (tmp_path / "cpu,cpuacct").glob("funcpipe-*")
    assert (memory / "memory.limit_in_bytes").read_text() == (memory / "memory.memsw.limit_in_bytes").read_text()
    assert (memory / "memory.limit_in_bytes").read_text() == "1000000000"
    assert (cpu / "cpu.cfs_period_us").read_text() == str(PERIOD_US)
    assert (cpu / "cpu.cfs_quota_us").read_text() == str(PERIOD_US // 2)
    assert (cpu / "cgroup.procs").read_text() == (memory / "cgroup.procs").read_text() == "0"
    assert group.kills() == 0
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group.kills() == 1
    assert group.peak_bytes() == 0
    (memory / "memory.max_usage_in_bytes").write_text("12345\n")
    assert group.peak_bytes() == 12345
    for folder in (memory, cpu):
        (folder / "cgroup.procs").write_text("")
    group.kill()
    assert group.remove()
    assert not memory.exists()
    assert not cpu.exists()


def test_a_group_of_version_2_lies_in_the_nearest_group_that_takes_limits(tmp_path: Path, files: list[str]) -> None:
    session = tmp_path / "user/session"
    session.mkdir(parents=True)
    (session / "cgroup.subtree_control").mkdir()  # which cannot be written, as where processes are in the group itself
    files += FILES_V2

    groups = Groups(mounts=MOUNTS_V2.format(root=tmp_path), own=OWN_V2)
    assert groups.memory
    assert groups.cpu
    group = groups.make()
    group.limit_memory(10**9)
    group.limit_cpu(1.5)
    (folder,) = tmp_path.rglob("funcpipe-*-1")
    assert folder.parent == tmp_path / "user"
    assert (folder / "memory.max").read_text() == "1000000000"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cpu.max").read_text() == f"{PERIOD_US * 3 // 2} {PERIOD_US}"
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 2\n")
    assert group.kills() == 2
    assert group.peak_bytes() == 0
    (folder / "memory.peak").write_text("12345\n")
    assert group.peak_bytes() == 12345
    (folder / "memory.peak").unlink()
    assert group.remove()


def test_where_there_are_none_nothing_is_limited() -> None:
    groups = Groups(mounts="", own="")
    assert not groups.memory
    assert not groups.cpu
    group = groups.make()
    group.limit_memory(1)
    group.limit_cpu(1)
    group.join()
    assert group.kills() == 0
    assert group.remove()


def test_the_groups_of_dead_processes_are_removed(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "memory/job/funcpipe-999999999-1").mkdir(parents=True)
    (tmp_path / "memory/job/funcpipe-1-1").mkdir(parents=True)
    (tmp_path / f"memory/job/funcpipe-{os.getpid()}-1").mkdir(parents=True)  # of another that had its number
    (tmp_path / "memory/job/funcpipe-999999998-1/left").mkdir(parents=True)  # as if a process were left in it
    (tmp_path / "memory/job/funcpipe-other").mkdir(parents=True)
    files += FILES_V1
    Groups(mounts=MOUNTS_V1.format(root=tmp_path), own=OWN_V1)
    left = {folder.name for folder in (tmp_path / "memory/job").glob("funcpipe-*")}
    assert left == {"funcpipe-1-1", "funcpipe-999999998-1", "funcpipe-other"}
