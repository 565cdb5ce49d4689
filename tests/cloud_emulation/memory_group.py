"""A memory limit as clouds impose it: a control group, where this machine lets one be made."""

import contextlib
import ctypes
import os
import signal
import time
import uuid
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ROOT = Path("/sys/fs/cgroup/memory")


class MemoryGroup:
    """A cgroup (version 1) of `limit_mb`; without a writable one, no limit."""

    def __init__(self, limit_mb: int) -> None:
        self._folder: Path | None = _ROOT / f"cloud-emulation-{uuid.uuid4().hex[:12]}"
        try:
            self._folder.mkdir()
            (self._folder / "memory.limit_in_bytes").write_text(str(limit_mb << 20))
        except OSError:
            self._folder = None

    @property
    def limits(self) -> bool:
        return self._folder is not None

    @property
    def members(self) -> Path | None:
        """The file into which a process writes its number to be in the group."""
        return self._folder and self._folder / "cgroup.procs"

    def __call__(self) -> None:
        """Put the calling process into the group; it ends when the thread that started it does, however that ends."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.members is not None:
            self.members.write_text(str(os.getpid()))

    def peak_mb(self) -> int:
        return int(self._read("memory.max_usage_in_bytes") or 0) >> 20

    def was_exceeded(self) -> bool:
        lines = self._read("memory.oom_control").splitlines()
        return any(line.split() > ["oom_kill", "0"] for line in lines if line.startswith("oom_kill "))

    def close(self) -> None:
        for _ in range(100):
            if self._folder is None or not self._folder.exists():
                return
            with contextlib.suppress(OSError):  # busy until the last process is gone
                self._folder.rmdir()
            time.sleep(0.02)

    def _read(self, name: str) -> str:
        """What the group says; nothing once another thread has closed it."""
        if self._folder is None:
            return ""
        try:
            return (self._folder / name).read_text()
        except OSError:
            return ""
