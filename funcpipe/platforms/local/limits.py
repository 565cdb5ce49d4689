"""Limits of a platform, imposed on functions of this machine as far as its system can."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from funcpipe.core import MB, FunctionSize, PlatformSpec
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.platforms.local.cgroup import Group, Groups
from funcpipe.platforms.local.link import link_of

_REMOVAL_S = 2.0  # for processes that were killed to leave their group


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
