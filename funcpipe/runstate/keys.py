"""The keys of everything that a run keeps in object storage.

Runs share nothing: a run's objects are below its name, those of a generation (a start or resumption) below its number
and a nonce. So nothing that is left of a run, such as a function that sleeps, can write into a later run of its name.
A message is named after the task that writes it, so a worker that repeats a step reads and writes the same objects;
what concerns one attempt of a worker carries the attempt's number.

Object stores take so many requests a second below one prefix, and nearly all requests of a run are for messages. So
these begin with three digits (`spread_prefix`), which spread the workers of a stage over 16 prefixes. All keys of a run
can still be listed at once.

    run-1/generations/0000-3fa9c2d1
    run-1/g0000-3fa9c2d1/run.json
    run-1/g0000-3fa9c2d1/leases/s0.r0/00000000
    run-1/000/g0000-3fa9c2d1/messages/s0.r0/00000007/put-activation.s0.r0.m1.k0
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from funcpipe.core import RunRef
from funcpipe.core.texts import spread_prefix
from funcpipe.errors import InvalidValue

_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_NONCE = re.compile(r"[0-9a-f]{0,16}", re.ASCII)
_PLACE = re.compile(
    r"([a-z0-9][a-z0-9-]{0,62})/(?:(?:[0-9a-f]{3}/)?g|generations/)(\d{4})(?:-([0-9a-f]{1,16}))?(?:\.json$|/|$)"
    r"(messages/)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one generation of one run. Raises InvalidValue for a name that would lead elsewhere.

    `nonce` is the fingerprint of the generation's key; it is empty in runs of earlier versions.
    """

    run: str
    generation: int = 0
    nonce: str = ""

    @classmethod
    def of(cls, ref: "RunRef | Keys") -> Self:
        """Return the keys of a generation, such as a payload or a record names."""
        return cls(ref.run, ref.generation, ref.nonce)

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise InvalidValue("run", self.run, "must be at most 63 small letters, digits and dashes")
        if not 0 <= self.generation < 10_000:
            raise InvalidValue("generation", self.generation, "must lie between 0 and 9999")
        if not _NONCE.fullmatch(self.nonce):
            raise InvalidValue("nonce", self.nonce, "must be at most 16 hexadecimal digits")

    @property
    def run_prefix(self) -> str:
        """The prefix of every key of the run."""
        return f"{self.run}/"

    @property
    def owner(self) -> "OwnerKeys":
        """The keys of the leases and statements of the clients that own the run."""
        return OwnerKeys(self.run)

    @property
    def base(self) -> str:
        """The prefix of what the run does not change; its objects are called by their SHA-256, in all generations."""
        return f"{self.run}/base/"

    @property
    def prefix(self) -> str:
        """The prefix of every key of the generation but messages."""
        return f"{self.run}/g{self._name}/"

    @property
    def reservations(self) -> str:
        """The prefix of all reservations."""
        return f"{self.run}/generations/"

    @property
    def reservation(self) -> str:
        """The reservation, which marks that this generation exists; written first."""
        return f"{self.reservations}{self._name}"

    @property
    def record(self) -> str:
        """The record of the run; written last, so that a generation without it does not count."""
        return self._key("run.json")

    @property
    def record_copy(self) -> str:
        """The record once more, in case the other one is lost."""
        return f"{self.reservation}.json"

    @property
    def saved_record(self) -> str:
        """The record once more, beside the checkpoints and as young as they are: both are enough to resume the run."""
        return self._key("checkpoints", "run.json")

    @property
    def records(self) -> tuple[str, ...]:
        """The record and its copies."""
        return self.record, self.record_copy, self.saved_record

    @property
    def finished(self) -> str:
        """The kept part of a finished run; with it, the generation has no functions and no messages."""
        return self._key("finished.json")

    @property
    def halt(self) -> str:
        """The first order to end the run early."""
        return self.order(0)

    def order(self, number: int) -> str:
        """The order `number` to end the run early; one follows only another that was overruled or does not hold."""
        return self._key("halts", f"{number:08d}")

    def verdict(self, number: int) -> str:
        """Return the key of the verdict on the order `number`."""
        return self._key("halts", f"{number:08d}.verdict")

    def bundle(self, stage: int) -> str:
        """Return the key of the code bundle of a stage."""
        return self._key("stage", f"s{stage}.bundle")

    def parameters(self, stage: int) -> str:
        """Return the key of the tensors that a stage starts from."""
        return self._key("stage", f"s{stage}.tensors")

    def data(self, name: str) -> str:
        """Return the key of an object of the run's data."""
        return self._key("data", name)

    def payload(self, worker: str) -> str:
        """Return the key of the invocation payload of the first attempt of `worker`."""
        return self._key("payloads", worker)

    @property
    def payloads(self) -> str:
        """The prefix of all payloads."""
        return self._folder("payloads")

    def message(self, worker: str, step: int, task: str) -> str:
        """Return the key of the object that `task` of `worker`, a put, writes in `step`."""
        return self._message(worker, worker, f"{step:08d}", task)

    def messages(self, worker: str) -> str:
        """Return the prefix of all messages of `worker`."""
        return f"{self._message(worker, worker)}/"

    def step_report(self, step: int, worker: str) -> str:
        """Return the key of the loss that `worker` reports after `step`."""
        return self._key("steps", f"{step:08d}.{worker}")

    @property
    def step_reports(self) -> str:
        """The prefix of all step reports."""
        return self._folder("steps")

    def step_summary(self, worker: str, attempt: int, steps: int) -> str:
        """Return the key of `attempt` of `worker`'s summary of the generation's steps before step `steps`."""
        return self._key("losses", worker, f"{attempt:08d}.{steps:08d}")

    def step_summaries(self, worker: str) -> str:
        """Return the prefix of all summaries of `worker`."""
        return self._folder("losses", worker)

    @property
    def all_step_summaries(self) -> str:
        """The prefix of all workers' summaries."""
        return self._folder("losses")

    def lease(self, worker: str, attempt: int) -> str:
        """Return the key of the lease of attempt `attempt` of `worker`."""
        return self._key("leases", worker, f"{attempt:08d}")

    @property
    def all_leases(self) -> str:
        """The prefix of the leases of all workers."""
        return self._folder("leases")

    def leases(self, worker: str) -> str:
        """Return the prefix of all leases of `worker`."""
        return self._folder("leases", worker)

    def heartbeat(self, worker: str, attempt: int) -> str:
        """Return the key of the last heartbeat of an attempt of `worker`."""
        return self._key("heartbeats", worker, f"{attempt:08d}")

    def heartbeats(self, worker: str) -> str:
        """Return the prefix of all heartbeats of `worker`."""
        return self._folder("heartbeats", worker)

    @property
    def all_heartbeats(self) -> str:
        """The prefix of all workers' heartbeats."""
        return self._folder("heartbeats")

    def hand_over(self, worker: str, attempt: int) -> str:
        """Return the key of the message that an attempt of `worker` leaves to the next when it hands over."""
        return self._key("hand-overs", worker, f"{attempt:08d}")

    def restart(self, worker: str, number: int) -> str:
        """Return the key of the restart `number`, counted from 0, of `worker` by its peers."""
        return self._key("restarts", worker, f"{number:08d}")

    def function(self, worker: str, attempt: int, token: str) -> str:
        """Return the key of the handle of a function that was started for an attempt of `worker`."""
        return self._key("functions", worker, f"{attempt:08d}.{token}")

    @property
    def started_together(self) -> str:
        """The key of the handles, once more, of the many functions that a client has started with the generation."""
        return self._key("functions", "together")

    @property
    def functions(self) -> str:
        """The prefix of all functions' handles."""
        return self._folder("functions")

    def worker_report(self, worker: str, attempt: int) -> str:
        """Return the key of the report of an attempt of `worker` when it ends."""
        return self._key("reports", worker, f"{attempt:08d}")

    @property
    def worker_reports(self) -> str:
        """The prefix of all workers' reports."""
        return self._folder("reports")

    def trace(self, worker: str, attempt: int) -> str:
        """Return the key of the events of an attempt of `worker`."""
        return self._key("traces", worker, f"{attempt:08d}")

    @property
    def traces(self) -> str:
        """The prefix of all traces."""
        return self._folder("traces")

    def done(self, worker: str, attempt: int, turn: int, step: int) -> str:
        """Exists once `attempt` of `worker` knows that it, or attempts before it, have finished `step` steps.

        A `turn` ends where the attempt goes back.
        """
        return self._key("progress", worker, f"{attempt:08d}.{turn:04d}.{step:08d}")

    def progress(self, worker: str) -> str:
        """Return the prefix of the `done` keys of `worker`."""
        return self._folder("progress", worker)

    @property
    def all_progress(self) -> str:
        """The prefix of the `done` keys of all workers."""
        return self._folder("progress")

    def renewal(self, day: int) -> str:
        """Exists once the run's objects were made young on that day of the run."""
        return self._key("renewals", f"{day:08d}")

    @property
    def renewals(self) -> str:
        """The prefix of all renewals."""
        return self._folder("renewals")

    def checkpoint(self, stage: int, name: str) -> str:
        """Return the key of a file of a checkpoint of `stage`."""
        return self._key("checkpoints", f"s{stage}", name)

    @property
    def checkpoints(self) -> str:
        """The prefix of all files of checkpoints."""
        return self._folder("checkpoints")

    @property
    def _name(self) -> str:
        return f"{self.generation:04d}" + (f"-{self.nonce}" if self.nonce else "")

    def _folder(self, *parts: str) -> str:
        return f"{self._key(*parts)}/"

    def _key(self, *parts: str) -> str:
        return self.prefix + _joined(parts)

    def _message(self, worker: str, *parts: str) -> str:
        """Return the key of a message, or of a folder of some, where those of `worker` are."""
        return f"{self.run}/{spread_prefix(worker)}/g{self._name}/messages/{_joined(parts)}"


def _joined(parts: Iterable[str]) -> str:
    for part in parts:
        if not _PART.fullmatch(part):
            raise InvalidValue("key", part, "must consist of letters, digits, dots, dashes and underscores")
    return "/".join(parts)


def newest_attempts(found: Iterable[str], folder: str) -> dict[str, tuple[int, str]]:
    """Return the newest attempt of each worker that has left an object below `folder`, by the keys found there.

    With each comes the key of that object.
    """
    newest: dict[str, tuple[int, str]] = {}
    for key in found:
        worker, _, attempt = key.removeprefix(folder).partition("/")
        if attempt.isdecimal():
            newest[worker] = max(newest.get(worker, (-1, "")), (int(attempt), key))
    return newest


def generation_of(key: str) -> Keys | None:
    """The generation that the object `key` belongs to; None for what belongs to none, such as what owners say."""
    match = _PLACE.match(key)
    return None if match is None else Keys(match[1], int(match[2]), match[3] or "")


def is_message(key: str) -> bool:
    """Return True if the object `key` is a message of a worker."""
    match = _PLACE.match(key)
    return match is not None and match[4] is not None


class OwnerKeys(Keys):
    """Keys of the leases and statements of the clients that own a run, which belong to no generation."""

    __slots__ = ()

    @property
    def prefix(self) -> str:
        """The prefix of all of these keys."""
        return f"{self.run}/owner/"

    def owner_lease(self, number: int, token: str) -> str:
        """Return the key of the lease of the owner of that number; `token` is its own."""
        return self._key("leases", f"{number:08d}.{token}")

    @property
    def owner_leases(self) -> str:
        """The prefix of all owners' leases."""
        return self._folder("leases")

    def owner_heartbeat(self, number: int, token: str) -> str:
        """Return the key of the heartbeat of the owner of that number; `token` is its own."""
        return self._key("heartbeats", f"{number:08d}.{token}")

    @property
    def owner_heartbeats(self) -> str:
        """The prefix of all owners' heartbeats."""
        return self._folder("heartbeats")
