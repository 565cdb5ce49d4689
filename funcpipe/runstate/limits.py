"""What a run may cost and how long it may take, as each of its functions reckons by itself.

No two clocks are compared: a function knows what the run had cost and taken when it was invoked, and its own age.
"""

import math

from funcpipe.core import Halt, Life


class RunAccount:
    """The limits of a run in one function."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def spent_usd(self, age_s: float) -> float:
        """What the run has cost when this function is so old; its functions' time, all of them running."""
        return self._life.spent_usd + age_s * self._life.run_usd_s

    def exceeded(self, age_s: float) -> str | None:
        """Which limit is exceeded when this function is so old."""
        life = self._life
        if life.max_usd is not None and self.spent_usd(age_s) > life.max_usd:
            return f"it would cost more than ${life.max_usd:g}"
        if life.deadline_s is not None and life.elapsed_s + age_s > life.deadline_s:
            return f"it would take longer than {life.deadline_s:g} s"
        return None

    def order(self, *, step: int, steps: int, age_s: float, step_s: float, end_s: float) -> Halt | None:
        """The order to end, once a limit would be exceeded by the time all have heard of it and ended.

        `step` steps of `steps` are done, each takes `step_s`, ending takes `end_s`.
        """
        last = step + self.notice_steps(step_s)
        if last >= steps:
            return None
        reason = self.exceeded(age_s + (last - step) * step_s + end_s)
        return None if reason is None else Halt(reason=reason, step=last)

    def notice_steps(self, step_s: float) -> int:
        """After so many steps every function has heard of an order that is given now."""
        return notice_steps(self._life.heartbeat_s, step_s)


def notice_steps(heartbeat_s: float, step_s: float) -> int:
    """The steps within which a function looks for orders twice, and one."""
    return 1 + math.ceil(2 * heartbeat_s / max(step_s, 1e-3))
