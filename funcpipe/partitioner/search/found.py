"""A plan that a search has found, as the stages of a space."""

from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import MB, Plan
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.search.spaces import Space

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """A plan found: its space and stages, and what it takes."""

    space: Space
    choices: list[StageChoice]
    iteration_s: float
    cost_usd: float

    def objective(self, goal: Goal) -> float:
        """What `goal` says of it."""
        return float(goal.objective(np.array(self.iteration_s), np.array(self.cost_usd)))

    def plan(self, problem: Problem) -> Plan:
        """The plan, with its estimate; of schedules that do equally well it has the simplest."""
        setting = self.space.setting
        plans = [
            problem.plan(replace(setting, schedule=schedule), self.choices)
            for schedule in problem.schedules(setting.replicas)
        ]
        chosen = next(plan for plan in plans if plan.schedule is setting.schedule)
        return next(plan for plan in plans if plan is chosen or _does_as_well(plan, chosen))


def _does_as_well(plan: Plan, other: Plan) -> bool:
    """Whether `plan` fits its functions and takes no more than `other`."""
    assert plan.estimate is not None
    assert other.estimate is not None
    fits = all(
        needs.memory_bytes <= stage.memory_mb * MB
        for needs, stage in zip(plan.estimate.stages, plan.stages, strict=True)
    )
    faster = plan.estimate.iteration_s <= other.estimate.iteration_s * (1 + _ROUNDING)
    return fits and faster and plan.estimate.cost_usd <= other.estimate.cost_usd * (1 + _ROUNDING)
