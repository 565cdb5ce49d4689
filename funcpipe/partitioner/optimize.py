"""The one way in: from a profile, a platform and a wish to a plan, by whatever policy was asked for."""

from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

from funcpipe.core import ModelProfile, Plan, PlatformSpec, TrainingSpec
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.problem.merge import merge
from funcpipe.partitioner.problem.pins import NO_PINS, Pins, PlacedPins
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.sync_choice import tuned

LAYER_LIMIT = 40
"""Profiles with more layers are merged to this many before they are planned."""


class Policy(Protocol):
    """A way to choose a plan."""

    def __call__(self, problem: Problem, *, time_limit_s: float | None = None) -> Plan:
        """The plan chosen; raises Infeasible."""


_SOLVERS = {
    "auto": "search.exact:exact",
    "exact": "search.exact:exact",
    "gurobi": "mip.solvers:gurobi",
    "scip": "mip.solvers:scip",
    "highs": "mip.solvers:highs",
    "mip": "mip.solvers:mip",
}
_POLICIES = {
    "exhaustive": "search.exhaustive:exhaustive",
    "lambdaml": "policies.data_parallel:lambdaml",
    "lambdaml-ga": "policies.data_parallel:lambdaml_ga",
    "hybridps": "policies.data_parallel:hybridps",
    "hybridps-ga": "policies.data_parallel:hybridps_ga",
    "tpdmp": "policies.partitions:tpdmp",
    "pipedream": "policies.partitions:pipedream",
    "bayes": "policies.bayes:bayes",
    "uniform": "policies.partitions:uniform",
}


def optimize(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    *,
    policy: str = "funcpipe",
    solver: str = "auto",
    time_limit_s: float | None = None,
    layer_limit: int = LAYER_LIMIT,
    pins: Pins = NO_PINS,
) -> Plan:
    """The best plan to train as `training` asks, by `policy`; `solver` says how the policy 'funcpipe' finds it.

    A profile of more than `layer_limit` layers is merged first, and the plan is optimal among the cuts that remain.
    After `time_limit_s` seconds the best plan so far is returned, with what is proved about it in `plan.solver`.
    Raises Infeasible when no plan satisfies the limits, PlanError when batch, micro-batch and replicas do not divide or
    the profile lacks a size of the platform, SolverUnavailable, and InvalidValue for an unknown policy, solver or pin.
    """
    find = find_policy(policy, solver)
    problem, starts = merged_problem(profile, spec, training, pins=pins, layer_limit=layer_limit)
    plan = find(problem, time_limit_s=time_limit_s)
    return unmerged(tuned(plan, problem) if policy == "funcpipe" else plan, starts)


def merged_problem(
    profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec, *, pins: Pins, layer_limit: int
) -> tuple[Problem, tuple[int, ...]]:
    """The problem with at most `layer_limit` layers, and where each begins in the profile, its end last."""
    merged = merge(profile, layer_limit, keep=PlacedPins(pins, profile, spec).cuts)
    return Problem(profile=merged.profile, spec=spec, training=training, pins=pins), merged.starts


def unmerged(plan: Plan, starts: tuple[int, ...]) -> Plan:
    """`plan`, its stages counted in the layers that were merged; `starts` says where each merged one begins."""
    stages = tuple(replace(stage, first=starts[stage.first], stop=starts[stage.stop]) for stage in plan.stages)
    return replace(plan, stages=stages)


def policies() -> tuple[str, ...]:
    """The names that `optimize` takes as policy."""
    return ("funcpipe", *_POLICIES)


def solvers() -> tuple[str, ...]:
    """The names that `optimize` takes as solver."""
    return tuple(_SOLVERS)


def find_policy(policy: str, solver: str = "auto") -> Policy:
    """The policy of that name; raises InvalidValue."""
    if policy not in policies():
        raise InvalidValue("policy", policy, f"must be one of {', '.join(policies())}")
    if solver not in solvers():
        raise InvalidValue("solver", solver, f"must be one of {', '.join(solvers())}")
    if policy != "funcpipe":
        return _load(_POLICIES[policy])
    return _load(_SOLVERS[solver])


def _load(place: str) -> Policy:
    module, _, name = place.partition(":")
    return cast(Policy, getattr(import_module(f"funcpipe.partitioner.{module}"), name))
