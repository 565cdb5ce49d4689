"""Control groups of Linux, of version 1 or 2: a limit on memory and a share of processors for the processes in one."""

import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PERIOD_US = 20_000
"""The time over which a share of processors is counted."""

_PREFIX = "funcpipe-"


class Group(ABC):
    """A new control group for one function: `folders` are its places in the hierarchies that it lies in."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        for folder in self._folders:
            folder.mkdir()

    @abstractmethod
    def limit_memory(self, memory_bytes: int) -> None:
        """Have a process killed when those of the group use more."""

    @abstractmethod
    def limit_cpu(self, vcpu: float) -> None:
        """Let the processes of the group have so many processors' time together."""

    @abstractmethod
    def kills(self) -> int:
        """Return the number of processes that were killed as the memory was used up."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most memory that the group's processes used together, 0 where the system does not report it."""

    def join(self) -> None:
        """Move this process into the group, and those that it will start."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text("0")

    def kill(self) -> None:
        """End the processes in the group."""
        for folder in self._folders:
            for pid in _read(folder / "cgroup.procs").split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group; returns False if a process is left in it."""
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self._folders)


class GroupV1(Group):
    """A group in the hierarchies `memory` and `cpu`, either of which may be missing."""

    def __init__(self, name: str, *, memory: Path | None, cpu: Path | None) -> None:
        self._memory = None if memory is None else memory / name
        self._cpu = None if cpu is None else cpu / name
        super().__init__(sorted({folder for folder in (self._memory, self._cpu) if folder is not None}))

    def limit_memory(self, memory_bytes: int) -> None:
        """Have a process killed when those of the group use more; no memory is swapped out instead."""
        if self._memory is not None:
            (self._memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            with_swap = self._memory / "memory.memsw.limit_in_bytes"
            if with_swap.exists():
                with_swap.write_text(str(memory_bytes))

    def limit_cpu(self, vcpu: float) -> None:
        """Let the processes of the group have so many processors' time together."""
        if self._cpu is not None:
            (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(round(vcpu * PERIOD_US)))

    def kills(self) -> int:
        """Return the number of processes that were killed as the memory was used up."""
        return 0 if self._memory is None else _count(self._memory / "memory.oom_control", "oom_kill")

    def peak_bytes(self) -> int:
        """Return the most memory that the processes of the group have used together, 0 where it is not counted."""
        return 0 if self._memory is None else int(_read(self._memory / "memory.max_usage_in_bytes") or 0)


class GroupV2(Group):
    """A group in the one hierarchy of version 2."""

    def __init__(self, name: str, *, parent: Path) -> None:
        self._folder = parent / name
        super().__init__([self._folder])

    def limit_memory(self, memory_bytes: int) -> None:
        """Have a process killed when those of the group use more; no memory is swapped out instead."""
        (self._folder / "memory.max").write_text(str(memory_bytes))
        swap = self._folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def limit_cpu(self, vcpu: float) -> None:
        """Let the processes of the group have so many processors' time together."""
        (self._folder / "cpu.max").write_text(f"{round(vcpu * PERIOD_US)} {PERIOD_US}")

    def kills(self) -> int:
        """Return the number of processes that were killed as the memory was used up."""
        return _count(self._folder / "memory.events", "oom_kill")

    def peak_bytes(self) -> int:
        """Return the most memory that the processes of the group have used together; Linux reports it since 5.19."""
        return int(_read(self._folder / "memory.peak") or 0)


class Groups:
    """The limits for which this process may make control groups. Groups that dead processes left are removed."""

    def __init__(self, mounts: str | None = None, own: str | None = None) -> None:
        places = _places(
            _read("/proc/self/mountinfo") if mounts is None else mounts,
            _read("/proc/self/cgroup") if own is None else own,
        )
        self._memory = _usable(places.get("memory", ()), "memory.limit_in_bytes")
        self._cpu = _usable(places.get("cpu", ()), "cpu.cfs_quota_us")
        self._unified = None if self._memory or self._cpu else _unified(places.get("", ()))
        self._made = 0
        for parent in (self._memory, self._cpu, self._unified):
            if parent is not None:
                _sweep(parent)

    @property
    def memory(self) -> bool:
        """True if memory can be limited."""
        return self._memory is not None or self._unified is not None

    @property
    def cpu(self) -> bool:
        """True if shares of processors can be limited."""
        return self._cpu is not None or self._unified is not None

    def make(self) -> Group:
        """Return a new group."""
        self._made += 1
        name = f"{_PREFIX}{os.getpid()}-{self._made}"
        if self._unified is not None:
            return GroupV2(name, parent=self._unified)
        return GroupV1(name, memory=self._memory, cpu=self._cpu)


def _places(mounts: str, own: str) -> Mapping[str, Sequence[Path]]:
    """Return, by controller of version 1, and '' for version 2, the own group's folder and those above it."""
    groups = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        groups.update(dict.fromkeys(names.split(","), path))
    places = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        controllers = options.split(",") if kind == "cgroup" else [""] if kind == "cgroup2" else []
        for controller in controllers:
            if controller in groups:
                places[controller] = list(_upwards(Path(mount), os.path.relpath(groups[controller], root)))
    return places


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    while path not in ("", ".") and not path.startswith(".."):
        yield mount / path
        path = os.path.dirname(path)
    yield mount


def _usable(folders: Sequence[Path], file: str) -> Path | None:
    """Return the first of the folders in which groups can be made that have a `file` to write to."""
    for folder in folders:
        trial = folder / f"{_PREFIX}{os.getpid()}-trial"
        try:
            trial.mkdir()
        except OSError:
            continue
        try:
            if os.access(trial / file, os.W_OK):
                return folder
        finally:
            trial.rmdir()
    return None


def _unified(folders: Sequence[Path]) -> Path | None:
    """Return the first of the folders of version 2 in which groups with both limits can be made."""
    for folder in folders:
        with suppress(OSError):  # refused where processes are in the group itself, and needless where it is done
            (folder / "cgroup.subtree_control").write_text("+memory +cpu")
        if _usable([folder], "memory.max") and _usable([folder], "cpu.max"):
            return folder
    return None


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        made_by = re.fullmatch(rf"{_PREFIX}(\d+)-\d+", folder.name, re.ASCII)
        if made_by is not None and not Path("/proc", made_by[1]).exists():
            with suppress(OSError):  # a process is left in it
                folder.rmdir()


def _count(file: Path, name: str) -> int:
    words = dict(line.split() for line in _read(file).splitlines())
    return int(words.get(name, 0))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
