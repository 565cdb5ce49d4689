"""The progress of an attempt of a worker, in steps, seconds and dollars, and the use of its time.

It counts its own storage requests and has to estimate those of all others, whom to ask would be requests again. How
many messages they put and get follows from the graph of each step. What a worker asks for besides its messages, for
leases, heartbeats and messages that have not come, is taken to be the same for all, and so are the bytes that it moves,
where a store costs by the byte.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from funcpipe.core import CountsByKind, Event, RequestCounts, RunAccount, Use, WorkerSpec
from funcpipe.core.trace import uses_of
from funcpipe.platforms.base import Invoked, StartClock
from funcpipe.runstate.halt import BudgetGuard
from funcpipe.training.device import peak_bytes


class WorkerProgress:
    """`done` of all `steps` steps are finished, those of earlier attempts included. The run has so many `workers`."""

    def __init__(self, spec: WorkerSpec, invoked: Invoked, *, steps: int) -> None:
        self._account = spec.account
        self._invoked = invoked
        self._accelerated = spec.device_memory_mb is not None
        self.workers = len(spec.plan.stages) * spec.plan.replicas
        self._own = self._others = self._for_all = CountsByKind()
        self.budget = BudgetGuard(spec.limits, spec.account, spec.faults.heartbeat_s, requests_usd=self._requests_usd)
        self.steps = steps
        self.done = spec.first_step
        self.longest_step_s = spec.account.step_s

    @property
    def age_s(self) -> float:
        """Seconds since this function was invoked."""
        return time.monotonic() - self._invoked.at_s

    @property
    def billed_s(self) -> float:
        """Seconds that this function is billed for so far."""
        return self._invoked.billed_s

    @property
    def start_s(self) -> float:
        """The seconds that this function's own start has taken so far, but for the wait for a predecessor."""
        return self._invoked.start.times.seconds

    @property
    def requests(self) -> CountsByKind:
        """The storage requests that this function has made."""
        return self._invoked.meter.by_kind

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory that this function has used."""
        return self._invoked.memory.peak_bytes()

    @property
    def peak_device_bytes(self) -> int:
        """The most memory that this function has used of its accelerator; 0 where it has none."""
        return peak_bytes() if self._accelerated else 0

    @property
    def function_usd(self) -> float:
        """Dollars that this function has cost."""
        return self.billed_s * self._account.usd_s

    @property
    def run_usd(self) -> float:
        """Dollars that the whole run has cost, with the hours of stores, but for the requests of this generation."""
        return self.budget.spent_usd(self.billed_s)

    @property
    def run_requests_usd(self) -> float:
        """Dollars for the requests of this generation, of all workers and clients, by estimate."""
        return self.budget.requests_usd()

    @property
    def run_s(self) -> float:
        """Seconds since the run began."""
        return self._account.elapsed_s + self.billed_s

    @property
    def account(self) -> RunAccount:
        """The account for a function that is invoked now."""
        return replace(
            self._account,
            spent_usd=self.run_usd,
            elapsed_s=self.run_s,
            requests_usd=self.run_requests_usd,
            step_s=self.longest_step_s,
        )

    @property
    def successor_account(self) -> RunAccount:
        """The account for a successor that is invoked now, and with it those of all other workers."""
        account = self.account
        return replace(account, requests_usd=account.requests_usd + self.workers * account.invocation_usd)

    def record_messages(self, own: CountsByKind, others: CountsByKind) -> None:
        """Record the messages of a step: those that this worker, and those that all others, have put and got."""
        self._own += own
        self._others += others

    def record_renewal(self, objects: int) -> None:
        """Record that this worker has made so many objects young, which no other does."""
        self._for_all += CountsByKind(default=RequestCounts(puts=objects))

    def _requests_usd(self) -> float:
        """Return dollars for the requests of all workers since this function was invoked."""
        usd = self._account.counted_usd
        besides_usd = max(usd(self.requests) - usd(self._own) - usd(self._for_all), 0.0)
        return usd(self.requests) + usd(self._others) + (self.workers - 1) * besides_usd


class TimeAccount:
    """The time of one function since it was `invoked`, by use; `clock` is that of its events."""

    def __init__(self, invoked: Invoked, clock: Callable[[], float] = time.time) -> None:
        self._invoked = invoked
        self._clock = clock
        self._seconds = dict.fromkeys(Use, 0.0)
        self.first_step: int | None = None

    def begin(self, step: int) -> None:
        """The function is ready for its first step, which is `step`."""
        if self.first_step is None:
            self.first_step = step
            self._seconds[Use.START] = self._invoked.billed_s
            self.start.end(self._invoked.billed_s)

    @property
    def start(self) -> StartClock:
        """What measures the function's start."""
        return self._invoked.start

    @contextlib.contextmanager
    def step(self) -> Iterator[Callable[[Sequence[Event]], None]]:
        """Account for a step; yields what to call with its events once it has ended, without which it is lost."""
        began_s, at_s = time.monotonic(), self._clock()
        ended: list[Sequence[Event]] = []
        try:
            yield ended.append
        finally:
            seconds = time.monotonic() - began_s
            if not ended:
                self._seconds[Use.LOST] += seconds
            for events in ended:
                self._add(events, at_s, seconds)
                self.start.step_ended(seconds)

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Account for a validation."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[Use.VALIDATION] += time.monotonic() - began_s

    def uses(self, alive_s: float) -> dict[str, float]:
        """Return the `alive_s` seconds for which the function is billed, by the names of uses."""
        if self.first_step is None:
            return {Use.START.value: alive_s}
        rest_s = max(alive_s - sum(self._seconds.values()), 0.0)
        seconds = {**self._seconds, Use.SAVE: rest_s}
        return {use.value: value for use, value in seconds.items() if value}

    def _add(self, events: Sequence[Event], at_s: float, seconds: float) -> None:
        """Add a step of so many `seconds`, which began `at_s` by the clock of its `events`; that clock may be set."""
        for use, value in uses_of(events, at_s, at_s + seconds).items():
            self._seconds[use] += value
