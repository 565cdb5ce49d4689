"""Control groups, on folders that look like the system's."""

from pathlib import Path

import pytest

from funcpipe.platforms.local.limits import PERIOD_US, Groups

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
    (tmp_path / "memory/job/funcpipe-other").mkdir(parents=True)
    files += FILES_V1
    Groups(mounts=MOUNTS_V1.format(root=tmp_path), own=OWN_V1)
    left = {folder.name for folder in (tmp_path / "memory/job").glob("funcpipe-*")}
    assert left == {"funcpipe-1-1", "funcpipe-other"}
