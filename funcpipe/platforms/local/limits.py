"""Limits of a platform, imposed on functions of this machine by control groups of Linux, of version 1 or 2."""

import json
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from funcpipe.core import MB, FunctionSize, PlatformSpec
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.local.throttle import link_of

_REMOVAL_S = 2.0  # for processes that were killed to leave their group

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


class FunctionLimits:
    """The limits of one function."""

    def __init__(self, spec: PlatformSpec, size: FunctionSize, group: Group, folder: str, *, shared_bytes: int) -> None:
        """`shared_bytes` are charged to the function besides what its group uses."""
        self._spec = spec
        self._shared_bytes = shared_bytes
        self._size = size
        self.group = group
        self._link = link_of(spec, size, folder)

    @property
    def lifetime_s(self) -> float | None:
        """The seconds after its invocation at which the function is to be killed."""
        return None if self._spec.lifetime_s is None else self._cold_start_s + self._spec.lifetime_s

    @property
    def _cold_start_s(self) -> float:
        """The cold start of the size, as far as it is known; the specification's is that of its slowest size."""
        own_s = self._size.cold_start_s
        return self._spec.cold_start_s if own_s is None else min(own_s, self._spec.cold_start_s)

    def payload(self, text: str) -> str:
        """Return the invocation payload, with the function's link to its storage."""
        invocation = json.loads(text)
        return json.dumps(invocation | {"storage": self._link.on(invocation["storage"])})

    def impose(self) -> float:
        """Take the limits on, in the function, and be as slow to start as it would be on the platform.

        Returns for how long the function is billed so far: platforms bill the start of an environment.
        """
        self.group.join()
        time.sleep(self._cold_start_s)
        return self._cold_start_s

    def explain(self, status: Status, *, late: bool) -> Status:
        """Return the function's last status, with the limit that ended it; `late` if its lifetime was over."""
        if status.state is State.FAILED and late:
            reason = f"timed out after {self._spec.lifetime_s:g} s"
            return Status(state=State.FAILED, reason=reason, cause=Cause.TIMED_OUT)
        if status.state is State.FAILED and self.group.kills():
            reason = f"out of memory: {self._size.memory_mb} MB"
            peak = self.group.peak_bytes()
            peak_bytes = peak + self._shared_bytes if peak else None
            return Status(state=State.FAILED, reason=reason, cause=Cause.OUT_OF_MEMORY, peak_bytes=peak_bytes)
        return status


class ImposedLimits:
    """Imposes limits on functions.

    A function is charged for the memory that it shares with this process, the one it is forked from, as well.
    """

    def __init__(
        self, spec: PlatformSpec, folder: str, groups: Groups, *, processors: int, shared_bytes: int | None = None
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._groups = groups
        self._processors = processors
        self._shared_bytes = _resident_bytes() if shared_bytes is None else shared_bytes
        self._vcpus: dict[FunctionLimits, float] = {}
        self._emptied: list[Group] = []

    def of_function(self, size_name: str) -> FunctionLimits:
        """Return the limits of a new function; raises InvalidValue for a size that the platform does not have."""
        size = self._spec.size(size_name)
        group = self._groups.make()
        group.limit_memory(max(size.memory_bytes - self._shared_bytes, MB))
        group.limit_cpu(size.vcpu)
        function_limits = FunctionLimits(self._spec, size, group, self._folder, shared_bytes=self._shared_bytes)
        self._vcpus[function_limits] = size.vcpu
        return function_limits

    def release(self, function_limits: FunctionLimits) -> None:
        """Forget a function that has ended, and what it left."""
        del self._vcpus[function_limits]
        function_limits.group.kill()
        self._emptied.append(function_limits.group)
        self._remove()

    def warnings(self) -> list[str]:
        """Return the limits that do not hold, and the consequences, with the functions that there are."""
        name, found = self._spec.name, []
        if not self._groups.memory:
            found.append(f"the memory of {name}'s functions is not imposed: no control group can be made here")
        if not self._groups.cpu:
            found.append(f"the processor share of {name}'s functions is not imposed: no control group can be made here")
        if sum(self._vcpus.values()) > self._processors:
            found.append(
                f"functions with more vCPUs than the {self._processors} processors of this machine run at once: "
                f"they compute slower than on {name}"
            )
        return found

    def close(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Remove the groups of functions that have ended, also where their processes are slow to go."""
        until_s = time.monotonic() + _REMOVAL_S
        self._remove()
        while self._emptied and time.monotonic() < until_s:
            sleep(0.01)
            self._remove()

    def _remove(self) -> None:
        self._emptied = [group for group in self._emptied if not group.remove()]


def _resident_bytes() -> int:
    """The memory that this process holds; 0 on systems that have no control groups either, and need not know it."""
    try:
        words = Path("/proc/self/statm").read_text().split()
    except FileNotFoundError:
        return 0
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


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
        # a dead process may have had the number of this one, which has made no group yet
        if made_by is not None and (made_by[1] == str(os.getpid()) or not Path("/proc", made_by[1]).exists()):
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
