"""The keys of everything that a run keeps in object storage.

Runs share nothing: a run's objects are below its name, those of a generation (a start or resumption) below its number.
A message is named after the task that writes it, so a worker that repeats a step reads and writes the same objects;
what concerns one attempt of a worker carries the attempt's number.

    run-1/generations/0000
    run-1/g0000/run.json
    run-1/g0000/leases/s0.r0/00000000
    run-1/g0000/messages/s0.r0/00000007/put-activation.s0.r0.m1.k0
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
        """Whose generation this is: only one client can put it."""
        return f"{self.reservations}{self.generation:04d}"

    @property
    def record(self) -> str:
        """The record of the run; written last, so that a generation without it does not count."""
        return self._key("run.json")

    @property
    def halt(self) -> str:
        """The order to end the run early."""
        return self._key("halt.json")

    def bundle(self, stage: int) -> str:
        """The code bundle of a stage."""
        return self._key("stage", f"s{stage}.bundle")

    def parameters(self, stage: int) -> str:
        """The tensors that a stage starts from."""
        return self._key("stage", f"s{stage}.tensors")

    def payload(self, worker: str) -> str:
        """The invocation payload of the first attempt of `worker`."""
        return self._key("payloads", worker)

    @property
    def payloads(self) -> str:
        """What the keys of all payloads begin with."""
        return self._folder("payloads")

    def message(self, worker: str, step: int, task: str) -> str:
        """The object that `task` of `worker`, a put, writes in `step`."""
        return self._key("messages", worker, f"{step:08d}", task)

    def messages(self, worker: str) -> str:
        """What the keys of all messages of `worker` begin with."""
        return self._folder("messages", worker)

    def step_report(self, step: int, worker: str) -> str:
        """The loss that `worker` reports after `step`."""
        return self._key("steps", f"{step:08d}.{worker}")

    def lease(self, worker: str, attempt: int) -> str:
        """Which function is attempt `attempt` of `worker`."""
        return self._key("leases", worker, f"{attempt:08d}")

    def leases(self, worker: str) -> str:
        """What the keys of all leases of `worker` begin with."""
        return self._folder("leases", worker)

    def heartbeat(self, worker: str) -> str:
        """The last heartbeat of `worker`."""
        return self._key("heartbeats", worker)

    def hand_over(self, worker: str, attempt: int) -> str:
        """What an attempt of `worker` leaves to the next when it hands over."""
        return self._key("hand-overs", worker, f"{attempt:08d}")

    def restart(self, worker: str, number: int) -> str:
        """The restart `number`, counted from 0, of `worker` by its peers."""
        return self._key("restarts", worker, f"{number:08d}")

    def function(self, worker: str, attempt: int, token: str) -> str:
        """The handle of a function that was started for an attempt of `worker`."""
        return self._key("functions", worker, f"{attempt:08d}.{token}")

    @property
    def functions(self) -> str:
        """What the keys of all functions' handles begin with."""
        return self._folder("functions")

    def worker_report(self, worker: str, attempt: int) -> str:
        """The report of an attempt of `worker` when it ends."""
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
        """Exists once `worker` has finished `step` steps."""
        return self._key("progress", worker, f"{step:08d}")

    def progress(self, worker: str) -> str:
        """What the `done` keys of `worker` begin with."""
        return self._folder("progress", worker)

    @property
    def all_progress(self) -> str:
        """What the `done` keys of all workers begin with."""
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
