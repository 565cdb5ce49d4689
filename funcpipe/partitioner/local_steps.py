"""What replicas gain by meeting less often: the best plan for each of some numbers of steps between meetings."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from funcpipe.core import ModelProfile, Plan, PlatformSpec, TrainingSpec
from funcpipe.errors import Infeasible
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.problem.goal import can_meet_every, meeting_every


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundChoice:
    """The best plan whose replicas meet after `sync_every` steps: the mean of its steps, and one that ends with a
    meeting. `efficiency` is its speed-up over one replica of the same stages, divided by the number of replicas.
    """

    sync_every: int
    replicas: int
    stages: int
    iteration_s: float
    meeting_s: float
    cost_usd: float
    efficiency: float


def round_choices(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    find: Callable[[ModelProfile, PlatformSpec, TrainingSpec], Plan],
) -> tuple[RoundChoice, ...]:
    """The best plans by `find` for meetings after 1, 2, 4, 8 and more steps, up to those that `training` allows.

    Left out are numbers of steps for which there is no plan, or between which fragments cannot meet one after the
    other. There are none where the number is not left open.
    """
    most, steps = training.sync_every_at_most, 1
    found = []
    while most is not None and steps <= most:
        if can_meet_every(training, steps):
            with suppress(Infeasible):  # for want of the memory of meetings, or of the time that more steps save
                found.append(_choice(find(profile, spec, meeting_every(training, steps)), steps, profile, spec))
        steps = most if steps < most < 2 * steps else 2 * steps
    return tuple(found)


def _choice(plan: Plan, steps: int, profile: ModelProfile, spec: PlatformSpec) -> RoundChoice:
    estimate = plan.estimate
    assert estimate is not None
    return RoundChoice(
        sync_every=steps,
        replicas=plan.replicas,
        stages=len(plan.stages),
        iteration_s=estimate.iteration_s,
        meeting_s=estimate.iteration_s if estimate.meeting_s is None else estimate.meeting_s,
        cost_usd=estimate.cost_usd,
        efficiency=efficiency(plan, profile, spec),
    )


def efficiency(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> float:
    """The speed-up of `plan` over one replica of its stages, whether that fits its functions or not, for each of its
    replicas.
    """
    assert plan.estimate is not None
    alone = evaluate(replace(plan, replicas=1), profile, spec)
    return alone.iteration_s / plan.estimate.iteration_s / plan.replicas
