"""How far an attempt of a worker has come: in steps, seconds and dollars."""

import time

from funcpipe.core import WorkerSpec
from funcpipe.runstate.limits import BudgetGuard


class WorkerProgress:
    """`done` of all `steps` steps are finished, those of earlier attempts included."""

    def __init__(self, spec: WorkerSpec, budget: BudgetGuard, *, steps: int, began_s: float) -> None:
        """`began_s` is when the function began, by the monotonic clock."""
        self._account = spec.account
        self._budget = budget
        self._began_s = began_s
        self.steps = steps
        self.done = spec.first_step

    @property
    def age_s(self) -> float:
        """Seconds since this function began."""
        return time.monotonic() - self._began_s

    @property
    def function_usd(self) -> float:
        """Dollars that this function has cost."""
        return self.age_s * self._account.usd_s

    @property
    def run_usd(self) -> float:
        """Dollars that the whole run has cost."""
        return self._budget.spent_usd(self.age_s)

    @property
    def run_s(self) -> float:
        """Seconds since the run began."""
        return self._account.elapsed_s + self.age_s
