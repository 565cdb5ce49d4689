"""What makes a plan good: dollars, with time being worth something, or seconds, within limits."""

import math
from dataclasses import dataclass

import numpy as np

from funcpipe.core import Plan, PlatformSpec, TrainingSpec
from funcpipe.partitioner.cost import Array

LIMIT_SLACK = 1e-9
"""The share by which seconds and dollars may exceed their limits, which allows for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What makes one plan better than another: fewer dollars, time being worth something, within the deadline.

    With a budget: fewer seconds, among the plans that stay within it.
    """

    time_value_usd_s: float = 0.0
    deadline_s: float = math.inf
    budget_usd: float = math.inf
    counts_seconds: bool = False

    def objective(self, iteration_s: Array, cost_usd: Array) -> Array:
        """What is minimised: dollars, or seconds under a budget; infinite where a limit is broken."""
        slack = 1 + LIMIT_SLACK
        allowed = (iteration_s <= self.deadline_s * slack) & (cost_usd <= self.budget_usd * slack)
        value = iteration_s if self.counts_seconds else cost_usd + self.time_value_usd_s * iteration_s
        return np.where(allowed, value, np.inf)

    def of_plan(self, plan: Plan) -> float:
        """The objective of a plan that has an estimate."""
        assert plan.estimate is not None
        return float(self.objective(np.array(plan.estimate.iteration_s), np.array(plan.estimate.cost_usd)))


def goal_of(training: TrainingSpec, spec: PlatformSpec) -> Goal:
    """What `training` asks for.

    An iteration must fit into a function's life. Where nothing costs anything, the fastest plan is best.
    """
    prices = (spec.price_put_usd, spec.price_get_usd, *(size.price_usd_s for size in spec.sizes))
    free = not any(prices) and training.time_value == 0
    life_s = math.inf if spec.lifetime_s is None else spec.lifetime_s - spec.cold_start_s
    return Goal(
        time_value_usd_s=(1.0 if free else training.time_value) / 3600,
        deadline_s=min(life_s, math.inf if training.deadline_s is None else training.deadline_s),
        budget_usd=math.inf if training.budget_usd is None else training.budget_usd,
        counts_seconds=training.budget_usd is not None,
    )
