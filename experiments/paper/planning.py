"""Profiles, platforms and the systems that are compared: what the simulated parts of the evaluation plan with."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from funcpipe.core import (
    Estimate,
    ModelProfile,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Sync,
    TrainingSpec,
    read,
)
from funcpipe.errors import Infeasible
from funcpipe.partitioner.alternatives import Front, pareto_front
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec

PROFILES = Path(__file__).parents[1] / "profiles"
BASELINES = ("lambdaml", "lambdaml-ga", "hybridps", "hybridps-ga")
PAPER = "FuncPipe (paper)"
"""The paper's own system: GPipe, its pipelined scatter-reduce, 32 bits on the wire, no recomputation."""
OURS = "funcpipe"
"""This project's: schedule, recomputation and synchronisation are chosen with the plan; no number changes."""

_FIXED: dict[str, Any] = {"schedule": ScheduleKind.GPIPE, "sync": Sync.PIPELINED, "recompute": Recompute.NEVER}
_CHOSEN: dict[str, Any] = {"schedule": None, "sync": None, "recompute": Recompute.AUTO}
LIMIT_S, FRONT_LIMIT_S = 5.0, 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, trained with a batch on a platform."""

    model: str
    spec: str
    batch: int

    def row(self) -> dict[str, Any]:
        return {"model": self.model, "platform": load_spec(self.spec).name, "batch": self.batch}


@functools.cache
def profile_of(model: str, spec: str) -> ModelProfile:
    """The reference model's profile for the sizes of a platform."""
    return rescaled(read(ModelProfile, PROFILES / f"{model}.json"), load_spec(spec))


def rescaled(measured: ModelProfile, spec: PlatformSpec) -> ModelProfile:
    """A profile for the sizes of `spec`: the seconds of one processor divided by each size's vCPUs.

    That is how the reference profiles were made for AWS Lambda, from whose first size they are taken.
    """
    if measured.platform == spec.name and measured.sizes == tuple(size.name for size in spec.sizes):
        return measured
    before = load_spec(measured.platform).size(measured.sizes[0]).vcpu
    shares = [before / size.vcpu for size in spec.sizes]
    layers = tuple(
        replace(
            layer,
            forward_s=tuple(layer.forward_s[0] * share for share in shares),
            backward_s=tuple(layer.backward_s[0] * share for share in shares),
        )
        for layer in measured.layers
    )
    return replace(measured, platform=spec.name, sizes=tuple(size.name for size in spec.sizes), layers=layers)


def training(system: str, batch: int, **wanted: Any) -> TrainingSpec:
    """What is asked of the planner for a system; baselines choose nothing of what is given here."""
    return TrainingSpec(global_batch=batch, **(_FIXED if system == PAPER else _CHOSEN), **wanted)


def best(case: Case, system: str, *, policy: str | None = None, **wanted: Any) -> Plan | None:
    """The system's plan for `wanted` (time_value, deadline_s, budget_usd, replicas); None if it has none.

    With a `policy` the plan is what that policy chooses for the system.
    """
    return _best(case, system, policy, tuple(wanted.items()))


@functools.cache
def _best(case: Case, system: str, policy: str | None, wanted: tuple[tuple[str, Any], ...]) -> Plan | None:
    profile, spec = profile_of(case.model, case.spec), load_spec(case.spec)
    return best_on(profile, spec, case.batch, system, policy=policy, **dict(wanted))


def best_on(
    measured: ModelProfile,
    spec: PlatformSpec,
    batch: int,
    system: str,
    *,
    policy: str | None = None,
    **wanted: Any,
) -> Plan | None:
    """`best` for a profile and a platform. A search takes `LIMIT_S` at most: what it has found by then is taken."""
    policy = policy or (OURS if system == PAPER else system)
    try:
        found = optimize(measured, spec, training(system, batch, **wanted), policy=policy, time_limit_s=LIMIT_S)
    except Infeasible:
        found = None
    if system == OURS and not is_proved(found):
        return better(found, best_on(measured, spec, batch, PAPER, **wanted))
    return found


def is_proved(plan: Plan | None) -> bool:
    """Whether no plan of its system can be better; not if its search was cut short."""
    return plan is not None and plan.is_proved


def better(one: Plan | None, other: Plan | None) -> Plan | None:
    """That which is better for what both were made for: the paper's plans are among ours."""
    if one is None or other is None:
        return one or other
    assert one.solver is not None
    assert other.solver is not None
    return one if one.solver.objective <= other.solver.objective else other


@functools.cache
def front(case: Case, system: str) -> Front:
    """The front of a system. A search takes `FRONT_LIMIT_S` at most; a front that is cut short says so."""
    measured, spec = profile_of(case.model, case.spec), load_spec(case.spec)
    return pareto_front(measured, spec, training(system, case.batch), time_limit_s=FRONT_LIMIT_S)


def estimate_of(plan: Plan) -> Estimate:
    """The plan's estimate, which every plan of the planner has."""
    assert plan.estimate is not None
    return plan.estimate


def seconds(plan: Plan) -> float:
    """Predicted seconds of an iteration."""
    return estimate_of(plan).iteration_s


def dollars(plan: Plan) -> float:
    """Predicted dollars of an iteration."""
    return estimate_of(plan).cost_usd


def simulated_on(specs: tuple[str, ...]) -> str:
    """On what the simulated numbers rest, in words."""
    names = " and ".join(load_spec(spec).name for spec in specs)
    return f"the cost model with the specification of {names}, and profiles of one processor divided by vCPUs"


def shape(plan: Plan) -> str:
    """A plan in a few words."""
    again = sum(stage.recompute for stage in plan.stages)
    recompute = f", {again} recompute" if again else ""
    return f"{len(plan.stages)} x {plan.replicas} {plan.schedule.value} {plan.sync.value}{recompute}"
