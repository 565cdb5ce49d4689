"""One machine alone: no parameter server, no network; its GPUs exchange gradients over PCIe."""

import math
from collections.abc import Iterator

from funcpipe.core.market import Machine, Market
from funcpipe.core.provision import CostItem, Provision, Rented
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.goal import Goal, no_way
from funcpipe.neighbours.provisioning.result import provision, what_binds
from funcpipe.neighbours.provisioning.risk import loss_rate_s
from funcpipe.neighbours.provisioning.workload import ModelWorkload, exchange_s


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
