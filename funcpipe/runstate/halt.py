"""Orders to end a run early, which any worker or client may give and every worker obeys.

Orders have numbers, and every worker obeys the same ones. A worker may be asleep between its decision and the order,
and order what was right long ago. Therefore an order of a worker holds only if that worker, when the first who has to
obey asks, was not superseded but by a successor that it has handed over to; and no order holds if a worker has passed
its step before it read it. The first to find out puts the verdict, and all others read it. An order that does not
hold may be followed by another; and one to end at once may follow any order to end after a step.

A function also orders the end where the run would exceed a limit of cost or time. No two clocks are compared: it knows
the run's cost and time at its own invocation, and its own age. It counts its own storage requests, and estimates those
of all others.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator

from funcpipe.core import Halt, HaltVerdict, RequestCounts, RunAccount, RunLimits
from funcpipe.errors import CorruptMessage, KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import exists, find_document, find_readable_document, get_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import is_superseded

_log = logging.getLogger(__name__)

ORDERING = RequestCounts(puts=1)
"""The storage requests of `halt_run`, where no order has been given before."""


def read_halt(storage: Storage, keys: Keys) -> Halt | None:
    """Return the order to end the run that counts, if there is one."""
    newest = None
    for number, halt in _orders(storage, keys):
        if read_verdict(storage, keys, number) is not False:
            newest = halt
    return newest


def read_halt_reason(storage: Storage, keys: Keys) -> str:
    """Return why the run was ended: by the order that counts, or by the newest, if it was found not to hold."""
    halt = read_halt(storage, keys)
    for _, newest in () if halt is not None else _orders(storage, keys):
        halt = newest
    return "its functions have ended, and no order says why; its logs do" if halt is None else halt.reason


def read_certain_halt(storage: Storage, keys: Keys) -> Halt | None:
    """Return the newest order to end the run that a client gave, or that a worker has found to hold."""
    certain = None
    for number, halt in _orders(storage, keys):
        if halt.worker is None or read_verdict(storage, keys, number):
            certain = halt
    return certain


def read_order(storage: Storage, keys: Keys, number: int) -> Halt | None:
    """Return the order of that number, if it was given."""
    return find_document(storage, Halt, keys.order(number))


def read_verdict(storage: Storage, keys: Keys, number: int) -> bool | None:
    """Return True if the order of that number holds; None if that is not decided yet, or the verdict cannot be read."""
    verdict = find_readable_document(storage, HaltVerdict, keys.verdict(number))
    return None if verdict is None else verdict.holds


def halt_run(storage: Storage, keys: Keys, halt: Halt) -> Halt:
    """Order the run to end; the order that counts, which is the first of those that hold."""
    for number in itertools.count():
        try:
            put_document(storage, keys.order(number), halt, if_absent=True)
        except KeyExists:
            other = find_readable_document(storage, Halt, keys.order(number))
            if other is None:  # it cannot be read, so no worker obeys it
                continue
            overruled = halt.step is None and other.step is not None
            if overruled or read_verdict(storage, keys, number) is False:
                continue
            return other
        when = "at once" if halt.step is None else f"after step {halt.step}"
        _log.warning("ordered the run to end %s: %s", when, halt.reason)
        return halt
    raise AssertionError("there is always another number")


def decide(storage: Storage, keys: Keys, number: int, halt: Halt, *, late: bool = False) -> bool:
    """Return True if the order `halt` of that number holds, as the first worker that asked has found.

    The caller must obey it now, or is `late`: it has passed the order's step already.
    """
    given_by_client = halt.worker is None or halt.attempt is None
    if given_by_client and halt.step is None:
        return True
    holds = not late and (given_by_client or _may_order(storage, keys, str(halt.worker), halt.attempt or 0))
    try:
        put_document(storage, keys.verdict(number), HaltVerdict(holds=holds), if_absent=True)
    except KeyExists:
        return get_document(storage, HaltVerdict, keys.verdict(number)).holds
    if not holds:
        why = "came too late" if late else f"was given by attempt {halt.attempt} of {halt.worker}, which was superseded"
        _log.warning("the order to end the run (%s) does not hold: it %s", halt.reason, why)
    return holds


def _may_order(storage: Storage, keys: Keys, worker: str, attempt: int) -> bool:
    """Return True if an attempt's orders hold: it still is the worker, or has handed over, which it does last."""
    return not is_superseded(storage, keys, worker, attempt) or exists(storage, keys.hand_over(worker, attempt))


def _orders(storage: Storage, keys: Keys) -> Iterator[tuple[int, Halt]]:
    for number in itertools.count():
        try:
            halt = read_order(storage, keys, number)
        except CorruptMessage as error:
            _log.warning("does without an object that cannot be read: %s", error)
            continue
        if halt is None:
            return
        yield number, halt


class BudgetGuard:
    """Reports in one function when the run exceeds its limits."""

    def __init__(
        self,
        limits: RunLimits,
        account: RunAccount,
        heartbeat_s: float,
        *,
        requests_usd: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Take `requests_usd`, which returns the cost of the whole run's requests since this function was invoked."""
        self._limits = limits
        self._account = account
        self._heartbeat_s = heartbeat_s
        self._requests_usd = requests_usd
        self._overlapped_s = 0.0
        self._overlaps_from_s = math.inf

    def begin_overlap(self, age_s: float) -> None:
        """At the age of `age_s`, this function has started a successor: from now on both are billed.

        All workers hand over at about the same time, so that all of them are taken to run twice.
        """
        self._overlaps_from_s = age_s

    def end_overlap(self, age_s: float) -> None:
        """At the age of `age_s`, this function takes over from one that has run beside it until now."""
        self._overlapped_s = age_s

    def spent_usd(self, age_s: float) -> float:
        """Dollars for functions and hours of stores when this one is `age_s` old, if all functions have run since."""
        beside_s = self._overlapped_s + max(age_s - self._overlaps_from_s, 0.0)
        hours_usd = age_s * self._account.hours_usd_s
        return self._account.spent_usd + (age_s + beside_s) * self._account.run_usd_s + hours_usd

    def requests_usd(self) -> float:
        """Return dollars for the requests of the run's generation so far."""
        return self._account.requests_usd + self._requests_usd()

    @property
    def is_limited(self) -> bool:
        """True if the run has a limit at all."""
        return self._limits.max_usd is not None or self._limits.deadline_s is not None

    def exceeded(self, age_s: float, *, ahead_s: float = 0.0, beside_s: float = 0.0) -> str | None:
        """Return the limit that is exceeded `ahead_s` after this function is `age_s` old, if requests go on as so far.

        Until then all functions run beside their successors for `beside_s` that are not counted yet.
        """
        max_usd, deadline_s = self._limits.max_usd, self._limits.deadline_s
        if deadline_s is not None and self._account.elapsed_s + age_s + ahead_s > deadline_s:
            return f"it would take longer than {deadline_s:g} s"
        if max_usd is None:
            return None
        asked_usd = self._requests_usd()
        later_usd = self._account.collect_usd + beside_s * self._account.run_usd_s
        later_usd += asked_usd * ahead_s / age_s if age_s > 0 else 0.0
        if self.spent_usd(age_s + ahead_s) + self._account.requests_usd + asked_usd + later_usd > max_usd:
            return too_expensive(max_usd)
        return None

    def halt_before_exceeding(
        self, *, step: int, steps: int, age_s: float, step_s: float, end_s: float, beside_s: float = 0.0
    ) -> Halt | None:
        """The order to give now, if otherwise a limit would be exceeded before all workers have read it and ended.

        `step` of `steps` steps are done; a step takes `step_s`, and ending takes `end_s`. `beside_s` as in `exceeded`.
        """
        last = step + self.notice_steps(step_s)
        if last >= steps:
            return None
        reason = self.exceeded(age_s, ahead_s=(last - step) * step_s + end_s, beside_s=beside_s)
        return None if reason is None else Halt(reason=reason, step=last)

    def notice_steps(self, step_s: float) -> int:
        """Return the number of steps after which every function has read an order that is given now."""
        return notice_steps(self._heartbeat_s, step_s)


def too_expensive(max_usd: float) -> str:
    """Return the reason of a run that ends at the limit of its cost."""
    return f"it would cost more than ${max_usd:g}"


def notice_steps(heartbeat_s: float, step_s: float) -> int:
    """Return the steps in which a function, which polls for orders with each heartbeat, polls twice; and one more."""
    return 1 + math.ceil(2 * heartbeat_s / max(step_s, 1e-3))
