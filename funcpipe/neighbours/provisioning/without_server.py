"""The ways without a parameter server: `funcpipe`, a pipeline on functions for the whole job, the same on functions of
this machine, `here`, and one machine alone.

A pipeline has starts, hand-overs and checkpoints; the GPUs of one machine exchange gradients over PCIe.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from funcpipe.core.estimate import JobEstimate
from funcpipe.core.market import Machine, Market
from funcpipe.core.plan import Plan, TrainingSpec
from funcpipe.core.platform import PlatformSpec
from funcpipe.core.profile import ModelProfile
from funcpipe.core.provision import CostItem, Provision, Rented
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.goal import Goal, loss_rate_s, no_way, provision, what_binds
from funcpipe.neighbours.provisioning.workload import ModelWorkload, exchange_s, on_this_machine
from funcpipe.partitioner.alternatives import pareto_front
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.room import Offer

JobEstimator = Callable[[Plan, int], JobEstimate]
"""An estimator of a job of so many steps by a plan: see `estimate_job`."""

_ROUNDS = 6
_SEARCH_S, _FRONT_S = 15.0, 40.0
"""Seconds after which a search for one plan, and for the whole front, takes the best that it has found."""


def job_steps(goal: Goal, global_batch: int) -> int:
    """The iterations of the whole job."""
    return max(1, math.ceil(goal.synchronous_samples() / global_batch - 1e-9))


def funcpipe(
    goal: Goal,
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    estimate: JobEstimator,
    way: str = "funcpipe",
) -> Provision:
    """The cheapest plan whose whole job meets the deadline; with only a budget, the fastest within it.

    The limit of one iteration is that of the job without starts, hand-overs and checkpoints, divided by the steps: as
    these depend on the plan, it is tightened until the job keeps the limit.
    """
    goal.check()
    steps, by_time = job_steps(goal, training.global_batch), not math.isinf(goal.deadline_s)
    whole = goal.deadline_s if by_time else goal.job.budget_usd
    free = replace(training, deadline_s=None, budget_usd=None)
    if whole is None:
        plan = _planned(profile, spec, free, goal, way)
        return as_provision(goal, plan, estimate(plan, steps), way)
    each = whole / steps
    for _ in range(_ROUNDS):
        wanted = replace(free, deadline_s=each) if by_time else replace(free, budget_usd=each)
        plan = _planned(profile, spec, wanted, goal, way)
        job = estimate(plan, steps)
        took = job.seconds if by_time else job.cost_usd
        if took <= whole:
            return as_provision(goal, plan, job, way)
        assert plan.estimate is not None, "a plan that was optimised has an estimate"
        own = plan.estimate.iteration_s if by_time else plan.estimate.cost_usd
        each = min((whole - (took - steps * own)) / steps, 0.99 * each)
        if each <= 0:
            break
    limit = f"{whole:.0f} s" if by_time else f"{whole:.2f} dollars"
    raise Infeasible(f"{way}: starts, hand-overs and checkpoints leave no room within {limit}; allow more")


def here(
    goal: Goal, profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec, offer: Offer, estimate: JobEstimator
) -> Provision:
    """As `funcpipe`, by functions on the processors and GPUs of this machine, which all have room there at once."""
    goal.check()

    def planned(part: PlatformSpec) -> Provision:
        return funcpipe(goal, *on_this_machine(profile, spec, part), training, estimate, "here")

    found = [planned(offer.spec)]
    reasons = list[Infeasible]()
    if not _has_room(offer, found[0]):
        found = []
        for part in offer.where_all_have_room():
            try:
                found.append(planned(part))
            except Infeasible as error:
                reasons.append(error)
    if not found:
        raise reasons[0] if reasons else Infeasible("here: this machine has no room for a function of any size")
    if math.isinf(goal.deadline_s) and goal.job.budget_usd is not None:
        return min(found, key=lambda one: one.seconds)
    return min(found, key=lambda one: goal.job.worth_usd(one.seconds, one.usd))


def _has_room(offer: Offer, found: Provision) -> bool:
    return found.plan is not None and offer.has_room(found.plan)


def funcpipe_front(
    goal: Goal, profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec, estimate: JobEstimator
) -> Iterator[Provision]:
    """The whole job by every plan that no other beats in both time and money."""
    steps = job_steps(goal, training.global_batch)
    for plan in pareto_front(profile, spec, training, time_limit_s=_FRONT_S).plans:
        yield as_provision(goal, plan, estimate(plan, steps))


def as_provision(goal: Goal, plan: Plan, job: JobEstimate, way: str = "funcpipe") -> Provision:
    """The record of a plan and its job."""
    assert plan.estimate is not None, "a plan that was optimised has an estimate"
    sizes = Counter[str]()
    for stage in plan.stages:
        sizes[stage.size] += plan.replicas
    shape = f"{len(plan.stages)} stages x {plan.replicas} replicas"
    cost = [CostItem(name="functions", usd=job.functions_usd), CostItem(name="requests", usd=job.requests_usd)]
    cost += [CostItem(name="stores", usd=job.hours_usd)] if job.hours_usd else []
    cost += [CostItem(name="traffic", usd=job.traffic_usd)] if job.traffic_usd else []
    by_budget = math.isinf(goal.deadline_s) and goal.job.budget_usd is not None
    best = "fastest plan within the budget" if by_budget else "cheapest plan that makes it"
    what = f"the {best}" if plan.is_proved else f"the {best} of those found in the time of a search"
    return provision(
        way,
        goal,
        rented=[Rented(name=f"{size} {plan.platform}", count=count) for size, count in sizes.items()],
        seconds=job.seconds,
        start_s=job.start.seconds,
        iterations=job.steps,
        cost=cost,
        binds=what_binds(job.seconds, goal.deadline_s),
        why=f"{what}: {shape}, bound by {plan.estimate.bottleneck}",
        plan=replace(plan, request=None),
    )


def _planned(profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec, goal: Goal, way: str) -> Plan:
    try:
        return optimize(profile, spec, training, time_limit_s=_SEARCH_S)
    except Infeasible as error:
        raise Infeasible(f"{way}: no plan for {goal.job.goal} is within the limit of an iteration: {error}") from error


def iteration_s(machine: Machine, market: Market, work: ModelWorkload, batch: int) -> float:
    """Seconds of one iteration: the batch's computation, then each GPU's gradients to the host and back over PCIe."""
    return batch * work.vcpu_s_per_sample / market.compute_vcpu(machine) + exchange_s(machine, work)


def predictions(goal: Goal, work: ModelWorkload, market: Market) -> Iterator[Provision]:
    """Every machine that holds the model, on demand and, where it has a price, on spot."""
    batch = goal.job.global_batch
    iterations = goal.synchronous_samples() / batch
    for machine in market.machines:
        if market.model_memory_mb(machine) < work.memory_mb:
            continue
        seconds = market.start_s + iterations * iteration_s(machine, market, work, batch)
        for spot in (False, True):
            usd_h = machine.usd_h(spot=spot)
            if usd_h is None:
                continue
            yield provision(
                "one-machine",
                goal,
                rented=[Rented(name=machine.name, count=1, spot=spot)],
                seconds=seconds,
                start_s=market.start_s,
                iterations=iterations,
                cost=[CostItem(name=machine.name, usd=usd_h * seconds / 3600)],
                binds=what_binds(seconds, goal.deadline_s),
                why="the cheapest single machine that makes it",
                losses_s=loss_rate_s(machine) if spot else 0.0,
                delay_s=market.replace_s,
            )


def one_machine(goal: Goal, work: ModelWorkload, market: Market) -> Provision:
    """The cheapest machine that meets the deadline, among those sure enough if there are any.

    Without a deadline it is the fastest within the budget, if there is that.
    """
    goal.check()
    every = list(predictions(goal, work, market))
    if not every:
        raise Infeasible(
            f"one-machine: the model needs {work.memory_mb:.0f} MB, which no machine of the market {market.name} has "
            "for it; add a larger one, or cut the model (the way funcpipe)"
        )
    made = [one for one in every if one.seconds <= goal.deadline_s]
    if not made:
        raise no_way("one-machine", goal, min(one.seconds for one in every), "the machines of the market")
    made = [one for one in made if (one.miss_chance or 0.0) <= goal.job.miss_chance] or made
    budget_usd = goal.job.budget_usd
    if math.isinf(goal.deadline_s) and budget_usd is not None:
        within = [one for one in made if one.usd <= budget_usd]
        if within:
            return min(within, key=lambda one: (one.seconds, one.usd))
    return min(made, key=lambda one: (one.usd, one.seconds))
