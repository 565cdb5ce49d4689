"""The limits of a run's cost and time, as each of its functions checks them by itself.

No two clocks are compared: a function knows the run's cost and time at its own invocation, and its own age.
"""

import math

from funcpipe.core import Halt, RunAccount, RunLimits


class BudgetGuard:
    """Tells in one function when the run exceeds its limits."""

    def __init__(self, limits: RunLimits, account: RunAccount, heartbeat_s: float) -> None:
        self._limits = limits
        self._account = account
        self._heartbeat_s = heartbeat_s

    def spent_usd(self, age_s: float) -> float:
        """Dollars that the run has cost when this function is `age_s` old, if all its functions have run since."""
        return self._account.spent_usd + age_s * self._account.run_usd_s

    def exceeded(self, age_s: float) -> str | None:
        """Which limit is exceeded when this function is `age_s` old."""
        max_usd, deadline_s = self._limits.max_usd, self._limits.deadline_s
        if max_usd is not None and self.spent_usd(age_s) > max_usd:
            return f"it would cost more than ${max_usd:g}"
        if deadline_s is not None and self._account.elapsed_s + age_s > deadline_s:
            return f"it would take longer than {deadline_s:g} s"
        return None

    def halt_before_exceeding(self, *, step: int, steps: int, age_s: float, step_s: float, end_s: float) -> Halt | None:
        """The order to give now, if otherwise a limit would be exceeded before all workers have read it and ended.

        `step` of `steps` steps are done; a step takes `step_s`, and ending takes `end_s`.
        """
        last = step + self.notice_steps(step_s)
        if last >= steps:
            return None
        reason = self.exceeded(age_s + (last - step) * step_s + end_s)
        return None if reason is None else Halt(reason=reason, step=last)

    def notice_steps(self, step_s: float) -> int:
        """The number of steps after which every function has read an order that is given now."""
        return notice_steps(self._heartbeat_s, step_s)


def notice_steps(heartbeat_s: float, step_s: float) -> int:
    """The steps in which a function, which looks for orders with each heartbeat, looks twice; and one more."""
    return 1 + math.ceil(2 * heartbeat_s / max(step_s, 1e-3))
