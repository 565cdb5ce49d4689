"""Which stores a plan takes: the best pair of a store for messages and one for sums, then one for checkpoints.

The pair is an outer choice. For each, the problem has the latency, the links and the prices of these two stores, and
dollars for their hours; the best plan of all pairs is the best plan. A pair is left out if another one is as good in
everything, and it is searched only for plans that are better than the best known so far. Checkpoints do not couple with
an iteration: theirs is the durable store in which writing one costs least, time valued.

By hand: stores A, B and C, where C has the latency of B and costs more. Of the nine pairs four are left: AA, AB, BA
and BB.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from funcpipe.core import Plan, PlatformSpec, Stores, StoreSpec
from funcpipe.core.stores import AUTO
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.catalog import Policy
from funcpipe.partitioner.cost.evaluate import evaluate, plan_loads, plan_setting
from funcpipe.partitioner.cost.formulas import parameter_copies
from funcpipe.partitioner.cost.pipeline import dollars
from funcpipe.partitioner.cost.stores import link
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.search.store_pairs import STORE_COSTS, STORE_LIMITS, allowed, in_stores

FILE_BYTES = 64 << 20
"""Of a file of a checkpoint, at most."""


def store_choices(spec: PlatformSpec, asked: Stores) -> tuple[Stores, ...]:
    """The pairs of stores worth searching, with checkpoints in the default store; the default pair first if it is one.

    Raises InvalidValue for stores that the platform does not have.
    """
    pairs = [
        Stores(messages=messages, sums=sums)
        for messages, sums in itertools.product(allowed(spec, asked.messages), allowed(spec, asked.sums))
    ]
    return tuple(
        pair
        for i, pair in enumerate(pairs)
        if not any(
            _is_as_good(spec, other, pair) and (j < i or not _is_as_good(spec, pair, other))
            for j, other in enumerate(pairs)
            if j != i
        )
    )


def _is_as_good(spec: PlatformSpec, pair: Stores, other: Stores) -> bool:
    """Whether no plan is worse in `pair` than in `other`."""
    kinds = ((pair.messages, other.messages), (pair.sums, other.sums))
    stores = all(_store_is_as_good(spec.store(a), spec.store(b)) for a, b in kinds)
    return stores and spec.stores_usd_h(pair) <= spec.stores_usd_h(other)


def _store_is_as_good(store: StoreSpec, other: StoreSpec) -> bool:
    """Whether `store` is no slower, dearer (hours aside) or more limited than `other`."""

    def most(owner: StoreSpec, name: str) -> float:
        value = getattr(owner, name)
        return math.inf if value is None else value

    cheap = all(getattr(store, name) <= getattr(other, name) for name in STORE_COSTS)
    return cheap and all(most(store, name) >= most(other, name) for name in STORE_LIMITS)


def best_over_stores(
    problem: Problem, choices: Sequence[Stores], find: Policy, *, time_limit_s: float | None = None
) -> Plan:
    """The best of the plans that `find` has in each of `choices`; for any policy or solver. Raises Infeasible."""
    started_s, plans, errors = time.monotonic(), [], []
    for stores in choices:
        left_s = None if time_limit_s is None else max(1e-3, time_limit_s - (time.monotonic() - started_s))
        try:
            plans.append(find(in_stores(problem, stores), time_limit_s=left_s))
        except Infeasible as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    best = min(plans, key=problem.goal.of_plan)
    if best.solver is None or len(choices) == 1:
        return best
    bounds = [None if plan.solver is None else plan.solver.bound for plan in plans]
    known = [bound for bound in bounds if bound is not None]
    return report(
        best,
        in_stores(problem, best.stores),
        name=best.solver.name,
        bound=min(known) if len(known) == len(bounds) else None,
        solve_s=time.monotonic() - started_s,
    )


def with_checkpoints(plan: Plan, problem: Problem, asked: str) -> Plan:
    """`plan` with its store of checkpoints: the one `asked` for, or the best.

    Of stores that cost by the hour only those are compared that the plan uses anyway. Raises InvalidValue for a store
    that may lose what it has acknowledged.
    """
    spec = problem.spec
    if asked != AUTO:
        if not spec.store(asked).durable:
            raise InvalidValue("stores.checkpoints", asked, "must be a store that keeps what it has acknowledged")
        return _moved(plan, problem, asked)
    stores = [spec.store(name) for name in spec.store_names]
    open_to_all = [s.name for s in stores if s.durable and (not s.price_usd_h or s.name in plan.stores.names)]
    return _moved(plan, problem, min(open_to_all, key=lambda name: checkpoint_usd(plan, problem, name)))


def _moved(plan: Plan, problem: Problem, checkpoints: str) -> Plan:
    if checkpoints == plan.stores.checkpoints:
        return plan
    stores = replace(plan.stores, checkpoints=checkpoints)
    moved = replace(plan, stores=stores, prices_note=problem.spec.prices_note(stores))
    return replace(moved, estimate=evaluate(moved, problem.profile, problem.spec))


def checkpoint_usd(plan: Plan, problem: Problem, name: str) -> float:
    """Dollars for writing one checkpoint of all stages to the store `name`, time valued: all functions wait for it."""
    store, profile, spec = problem.spec.store(name), problem.profile, problem.spec
    loads, setting = plan_loads(plan, profile, spec), plan_setting(plan, profile, spec)
    gradients = 1  # a copy that is not saved
    saved = (parameter_copies(setting) - gradients) * loads.parameter_bytes + loads.constant_bytes
    savers = plan.replicas if plan.is_sharded else 1
    up, _ = link(loads, store, len(plan.stages) * savers)
    seconds = float((saved / up).max()) + 2 * store.latency_s  # the files side by side, then the manifest
    puts = savers * sum(math.ceil(one / FILE_BYTES) + 1 for one in saved.tolist())
    storage_usd = store.request_usd(puts, 0) + store.transfer_usd(savers * float(saved.sum()), 0.0)
    worth_usd_s = plan.replicas * float(loads.price_usd_s.sum()) + problem.goal.time_value_usd_s
    return float(dollars(worth_usd_s, seconds, storage_usd))
