"""Where everything of a run lies in the object storage.

Nothing is shared by two runs: all of a run lies below its name, all of a generation of it below its number. A
generation begins when a run is started or resumed. A message is named after the task that writes it, so that a worker
which does a step again finds, and writes, the same objects; what an attempt alone says carries its number.
"""

import re
from dataclasses import dataclass

from funcpipe.errors import InvalidValue

_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one generation of one run. Raises InvalidValue for a name that would lead elsewhere."""

    run: str
    generation: int = 0

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise InvalidValue("run", self.run, "must be at most 63 small letters, digits and dashes")
        if not 0 <= self.generation < 10_000:
            raise InvalidValue("generation", self.generation, "must lie between 0 and 9999")

    @property
    def run_prefix(self) -> str:
        """What every key of the run begins with."""
        return f"{self.run}/"

    @property
    def prefix(self) -> str:
        """What every key of the generation begins with."""
        return f"{self.run}/g{self.generation:04d}/"

    @property
    def reservations(self) -> str:
        """What the keys of all reservations begin with."""
        return f"{self.run}/generations/"

    @property
    def reservation(self) -> str:
        """Who is the first to begin the generation."""
        return f"{self.reservations}{self.generation:04d}"

    @property
    def record(self) -> str:
        """What the run is; written last, so that a generation without it never began."""
        return self._key("run.json")

    @property
    def halt(self) -> str:
        """The order to end early."""
        return self._key("halt.json")

    def bundle(self, stage: int) -> str:
        """The code of a stage."""
        return self._key("stage", f"s{stage}.bundle")

    def parameters(self, stage: int) -> str:
        """The tensors that a stage starts from."""
        return self._key("stage", f"s{stage}.tensors")

    def payload(self, worker: str) -> str:
        """What `worker` was told when the generation began."""
        return self._key("payloads", worker)

    @property
    def payloads(self) -> str:
        """What the keys of all payloads begin with."""
        return self._folder("payloads")

    def message(self, worker: str, step: int, task: str) -> str:
        """The object that the task `task` of `worker`, a put, writes in `step`."""
        return self._key("messages", worker, f"{step:08d}", task)

    def messages(self, worker: str) -> str:
        """What the keys of all messages of `worker` begin with."""
        return self._folder("messages", worker)

    def step_report(self, step: int, worker: str) -> str:
        """What `worker` says after `step`."""
        return self._key("steps", f"{step:08d}.{worker}")

    def lease(self, worker: str, attempt: int) -> str:
        """Who runs `worker` as its attempt of that number."""
        return self._key("leases", worker, f"{attempt:08d}")

    def leases(self, worker: str) -> str:
        """What the keys of all leases of `worker` begin with."""
        return self._folder("leases", worker)

    def heartbeat(self, worker: str) -> str:
        """How `worker` fares."""
        return self._key("heartbeats", worker)

    def hand_over(self, worker: str, attempt: int) -> str:
        """What an attempt of `worker` says to the next when it leaves."""
        return self._key("hand-overs", worker, f"{attempt:08d}")

    def restart(self, worker: str, number: int) -> str:
        """Who starts `worker` again, the how-manieth of those that wait for it."""
        return self._key("restarts", worker, f"{number:08d}")

    def function(self, worker: str, attempt: int, token: str) -> str:
        """The handle of a function that was started for an attempt of `worker`."""
        return self._key("functions", worker, f"{attempt:08d}.{token}")

    @property
    def functions(self) -> str:
        """What the keys of all functions' handles begin with."""
        return self._folder("functions")

    def worker_report(self, worker: str, attempt: int) -> str:
        """What an attempt of `worker` says when it ends."""
        return self._key("reports", worker, f"{attempt:08d}")

    @property
    def worker_reports(self) -> str:
        """What the keys of all workers' reports begin with."""
        return self._folder("reports")

    def trace(self, worker: str, attempt: int) -> str:
        """The events of an attempt of `worker`."""
        return self._key("traces", worker, f"{attempt:08d}")

    @property
    def traces(self) -> str:
        """What the keys of all traces begin with."""
        return self._folder("traces")

    def done(self, worker: str, step: int) -> str:
        """That `worker` has done `step` steps."""
        return self._key("progress", worker, f"{step:08d}")

    def progress(self, worker: str) -> str:
        """What the keys begin with that say how many steps `worker` has done."""
        return self._folder("progress", worker)

    @property
    def all_progress(self) -> str:
        """The same for all workers."""
        return self._folder("progress")

    def checkpoint(self, stage: int, name: str) -> str:
        """A file of a checkpoint of `stage`."""
        return self._key("checkpoints", f"s{stage}", name)

    @property
    def checkpoints(self) -> str:
        """What the keys of all files of checkpoints begin with."""
        return self._folder("checkpoints")

    def _folder(self, *parts: str) -> str:
        return f"{self._key(*parts)}/"

    def _key(self, *parts: str) -> str:
        for part in parts:
            if not _PART.fullmatch(part):
                raise InvalidValue("key", part, "must consist of letters, digits, dots, dashes and underscores")
        return self.prefix + "/".join(parts)
