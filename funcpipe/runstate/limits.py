"""The limits of a run's cost and time, as each of its functions checks them by itself.

No two clocks are compared: a function knows the run's cost and time at its own invocation, and its own age. It counts
its own storage requests, and estimates those of all others (`worker.progress`).
"""

import math
from collections.abc import Callable

from funcpipe.core import Halt, RunAccount, RunLimits


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
