"""The `Provision` of a chosen configuration: dollars item by item, the predicted curve, the chance to miss."""

import math
from collections.abc import Sequence

from funcpipe.core.plan import Plan
from funcpipe.core.provision import CostItem, CurvePoint, Provision, Rented
from funcpipe.neighbours.provisioning.goal import Cluster, Goal
from funcpipe.neighbours.provisioning.risk import miss_chance

_POINTS = 25


def provision(
    way: str,
    goal: Goal,
    *,
    rented: Sequence[Rented],
    seconds: float,
    start_s: float,
    iterations: float,
    cost: Sequence[CostItem],
    binds: str,
    why: str,
    cluster: Cluster | None = None,
    losses_s: float = 0.0,
    delay_s: float = 0.0,
    assumptions: Sequence[str] = (),
    plan: Plan | None = None,
) -> Provision:
    """The record of a configuration that takes `seconds`, of which the first `start_s` pass before any iteration."""
    spread = goal.spread(cluster)
    usd = sum(item.usd for item in cost)
    return Provision(
        way=way,
        rented=tuple(rented),
        seconds=seconds,
        iterations=iterations,
        cost=tuple(cost),
        binds=binds,
        why=why,
        start_s=start_s,
        spread=spread,
        losses_s=losses_s,
        delay_s=delay_s,
        miss_chance=miss_chance(seconds, goal.job.deadline_s, spread=spread, losses_s=losses_s, delay_s=delay_s),
        curve=curve(goal, seconds=seconds, start_s=start_s, usd=usd, cluster=cluster),
        assumptions=tuple(assumptions),
        plan=plan,
    )


def curve(goal: Goal, *, seconds: float, start_s: float, usd: float, cluster: Cluster | None) -> tuple[CurvePoint, ...]:
    """Work, dollars and loss over time; the work goes on evenly after the start, the dollars from the beginning."""
    points = []
    for i in range(_POINTS + 1):
        done = i / _POINTS
        time_s = start_s + done * (seconds - start_s)
        spent_usd = usd * time_s / seconds if seconds else usd
        points.append(CurvePoint(time_s=time_s, done=done, usd=spent_usd, loss=goal.loss_at(done, cluster)))
    return tuple(points)


def what_binds(seconds: float, deadline_s: float) -> str:
    """Return what binds: the deadline, if it leaves a slower, cheaper configuration no room."""
    return "deadline" if not math.isinf(deadline_s) and seconds > 0.9 * deadline_s else "price"
