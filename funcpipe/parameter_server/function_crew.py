"""The crew on functions: they and the server, which is in this process, exchange objects through a storage.

After each update the server's parameters are put there once, for all functions. λDNN trains in this way: this process
runs on the machine of the server, and the storage is there too, such as a Redis server's.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from funcpipe.core import RequestCounts, ServerFunctionSpec
from funcpipe.errors import WorkerFailed
from funcpipe.parameter_server.crew import Lost, Pushed
from funcpipe.parameter_server.function_fleet import FunctionFleet
from funcpipe.parameter_server.function_line import FunctionLine, Given, Heard, Told
from funcpipe.parameter_server.function_messages import FunctionMessage, ServerKeys
from funcpipe.parameter_server.replica import ServerJob
from funcpipe.parameter_server.saved import SavedServer
from funcpipe.parameter_server.server import ParameterServer
from funcpipe.parameter_server.values import Chunk, Progress, Push, ServerWorker, WorkTimes
from funcpipe.platforms.base import Platform, Storage
from funcpipe.runstate.checkpoint_files import serialised
from funcpipe.runstate.keys import Keys
from funcpipe.training.data import Step

_POLL_S = 0.25
_END_WITHIN_S = 20.0
"""How long functions that were told to end have time for it, before they are stopped."""


@dataclass(frozen=True, kw_only=True)
class FunctionSite:
    """What a crew is made of: functions like `spec` on `platform`, and `storage`, which signs with the run's key.

    Where one `gathers`, as for synchronous updates, nobody is given work while another worker hands over in time, which
    takes a cold start: else the rest would have to do all of a step.
    """

    job: ServerJob
    spec: ServerFunctionSpec
    platform: Platform
    storage: Storage
    gathers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsUsed:
    """What a worker has used: so many functions, billed for so many seconds in all, and their storage requests."""

    functions: int = 0
    seconds: float = 0.0
    requests: RequestCounts = field(default_factory=RequestCounts)


class FunctionCrew:
    """A context manager; afterwards its functions have ended, or have said their last word.

    Meanwhile this process computes with one thread, as functions do: sums of several may differ in their last bits.
    """

    def __init__(
        self, site: FunctionSite, workers: Sequence[ServerWorker], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._site, self._first, self._clock = site, tuple(workers), clock
        self._keys = ServerKeys(Keys.of(site.spec))
        self._told: Told = queue.SimpleQueue()
        self._fleet = FunctionFleet(site.spec, site.platform, site.storage, self._told, clock=clock)
        self._saved = SavedServer(site.storage, site.spec.run)
        self._versions: list[int] = []
        self._waiting: list[Lost] = []
        self._began_s = clock()
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        """Put the code where functions find it, start them, and return when they are ready.

        Raises PlatformError, PlatformRefused or WorkerFailed.
        """
        self._began_s, self._threads = self._clock(), torch.get_num_threads()
        torch.set_num_threads(1)
        keys, job = self._keys.keys, self._site.job
        lost = list[Lost]()
        try:
            self._site.storage.put(keys.bundle(0), job.bundle)
            self._site.storage.put(keys.parameters(0), serialised(job.tensors))
            self.restart_server()
            for worker in self._first:
                self.join(worker)
            while not all(seat.is_ready for seat in self._fleet.seats.values()):
                event = self.next()
                lost += [event] if isinstance(event, Lost) else []
        except BaseException:
            self._end(stop=True)
            raise
        self._waiting += lost
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(stop=error is not None)

    @property
    def workers(self) -> tuple[ServerWorker, ...]:
        """Those that may be given work."""
        seats = [seat for seat in self._fleet.seats.values() if not seat.leaving]
        if self._site.gathers and any(seat.handing_over or seat.is_closing for seat in seats):
            return ()
        return tuple(seat.worker for seat in seats if seat.is_open)

    @property
    def awaits(self) -> bool:
        """Whether functions are starting, or are about to."""
        return any(not seat.is_open for seat in self._fleet.seats.values())

    def join(self, worker: ServerWorker) -> None:
        """Start a worker; it is given work once it has loaded the model."""
        self._fleet.join(worker)

    def leave(self, name: str) -> None:
        """Give a worker no more work; it ends what it has."""
        self._fleet.leave(name)

    def begin(self, worker: str, chunk: Chunk) -> None:
        """Let a worker pull the parameters as they are now, compute and push."""
        line = self._fleet.seats[worker].line
        assert line is not None, "only workers that are ready are given work"
        line.begin(chunk, self._server.version)

    def next(self) -> Pushed | Lost | None:
        """The next push or loss; None if there is none for now. Raises WorkerFailed for what another function would
        not do better.
        """
        self._waiting += self._fleet.look()
        self._fleet.start_due()
        if self._waiting:
            return self._waiting.pop(0)
        try:
            heard = self._told.get(timeout=_POLL_S)
        except queue.Empty:
            return None
        return self._handle(heard)

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Take a synchronous step; its mean loss. Raises NotFinite as the recipe says."""
        loss = self._server.update(step, ids)
        self._publish()
        return loss

    def save(self) -> None:
        """Write a checkpoint."""
        self._saved.save(self._server)

    def progress(self) -> Progress:
        """How far the server has come."""
        return self._server.progress()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""
        return self._server.state_dict()

    def restart_server(self) -> None:
        """Go on from the newest checkpoint; what functions were given is forgotten."""
        self._server = ParameterServer(self._site.job)
        self._saved.restore_into(self._server)
        for line in self._fleet.lines:
            line.given.clear()
        self._publish()

    def used(self) -> dict[str, FunctionsUsed]:
        """What each worker has used so far, by name."""
        found: dict[str, FunctionsUsed] = {}
        for line in self._fleet.lines:
            before = found.get(line.spec.worker, FunctionsUsed())
            found[line.spec.worker] = FunctionsUsed(
                functions=before.functions + 1,
                seconds=before.seconds + line.billed_s,
                requests=before.requests + (RequestCounts() if line.last is None else line.last.requests),
            )
        return found

    @property
    def lifetime_s(self) -> float:
        """How long there has been a server, or was one."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    def _handle(self, heard: Heard) -> Pushed | Lost | None:
        line, message = heard.line, heard.message
        if heard.error is not None and not line.over:
            raise heard.error
        if line.over:
            return None
        if message is None:
            return self._fleet.ended(line)
        given = line.hear(message)
        if message.error is not None:
            return self._failed(line, message, given)
        pushed = None if given is None or not message.loss_sums else self._take(line, message, given, heard)
        if given is not None and pushed is None:
            line.given[message.number] = given  # it has left without an answer
        lost = self._fleet.answered(line, message)
        if pushed is not None and lost is not None:
            self._waiting.append(lost)
        return pushed or lost

    def _failed(self, line: FunctionLine, message: FunctionMessage, given: Given | None) -> Lost | None:
        reason = message.error or ""
        if message.out_of_memory:
            raise self._fleet.out_of_memory(line, reason)
        if not message.retryable:
            raise WorkerFailed(f"worker {line.spec.worker} failed: {reason}")
        if given is not None:
            line.given[message.number] = given
        return self._fleet.lose(line, reason.splitlines()[0])

    def _take(self, line: FunctionLine, message: FunctionMessage, given: Given, heard: Heard) -> Pushed:
        """Let the server have a push."""
        push = Push(version=message.version, chunk=given.chunk, vectors=heard.vectors, loss_sums=message.loss_sums)
        applied = None
        if given.chunk.separate:
            self._server.collect(push)
        else:
            applied = self._server.apply(push, given.chunk.step)
            if applied is not None:
                self._publish()
        now_s = self._clock()
        rest_s = now_s - given.at_s - message.pull_s - message.compute_s
        times = WorkTimes(pull_s=message.pull_s, compute_s=message.compute_s, push_s=max(rest_s, 0.0))
        return Pushed(worker=line.spec.worker, chunk=given.chunk, time_s=now_s, applied=applied, times=times)

    def _publish(self) -> None:
        """Put the parameters where functions find them, and delete those that nobody was told to take."""
        version, parameters = self._server.pull()
        if version not in self._versions:
            self._site.storage.put(self._keys.parameters(version), serialised(parameters))
            self._versions.append(version)
        needed = {given.version for line in self._fleet.lines if not line.over for given in line.given.values()}
        old = [each for each in self._versions if each != version and each not in needed]
        self._site.storage.delete_many([self._keys.parameters(each) for each in old])
        self._versions = [each for each in self._versions if each not in old]

    def _end(self, *, stop: bool) -> None:
        """Let all functions end: at once, or when they have read that they are to."""
        fleet = self._fleet
        if not stop:
            for line in fleet.lines:
                if not line.over:
                    line.end()
            until_s = self._clock() + _END_WITHIN_S
            while any(not line.over for line in fleet.lines) and self._clock() < until_s:
                self._await_last_words()
        fleet.stop()
        torch.set_num_threads(self._threads)
        self._ended_s = self._clock()

    def _await_last_words(self) -> None:
        try:
            heard = self._told.get(timeout=_POLL_S)
        except queue.Empty:
            self._fleet.look()
            return
        if heard.message is not None:
            heard.line.hear(heard.message)
        if heard.message is None or heard.message.leaves:
            heard.line.close()
