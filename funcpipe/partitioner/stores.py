"""Which stores a plan takes: the best pair of a store for messages and one for sums, then one for checkpoints.

The pair is an outer choice. For each, the problem has the latency, the links and the prices of these two stores, and
dollars for their hours; the best plan of all pairs is the best plan. A pair is left out if another one is as good in
everything, and it is searched only for plans that are better than the best known so far. By hand: stores A, B and C,
where C has the latency of B and costs more. Of the nine pairs four are left: AA, AB, BA and BB.

The exact search looks into some pairs one by one, and leaves the others out in groups. By hand: with stores A and B for
messages and A, B and C for sums there are six pairs. The best plan in AA costs 10 $, and would cost 8 $ in BB, where
the search goes on and finds one of 7 $. Pairs with the same store for messages are left out together if nothing is
below 7 $ even in a store for sums that is as fast as the fastest and as cheap as the cheapest of theirs; otherwise the
most promising pair of the group is looked into, and the rest is tried again.

Checkpoints do not couple with an iteration: theirs is the durable store in which writing one costs least, time valued.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from funcpipe.core import Plan, PlatformSpec, Stores, StoreSpec
from funcpipe.core.stores import AUTO
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner import Policy
from funcpipe.partitioner.cost.evaluate import check_objects, evaluate, plan_loads
from funcpipe.partitioner.cost.pipeline import dollars
from funcpipe.partitioner.cost.stores import checkpoint_files, link
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.search.exact import explain_infeasible, search_below, time_limit
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.search import Search
from funcpipe.partitioner.search.spaces import Space, Tables, spaces

_ROUNDING = 1e-9

STORE_COSTS = ("latency_s", "polled", "price_put_usd", "price_get_usd", "price_sent_usd_gb", "price_received_usd_gb")
STORE_LIMITS = ("bytes_s", "shared_bytes_s", "largest_bytes", "puts_s", "gets_s", "requests_s")
"""Fields of which less is better, hours aside; and fields of which more is better, or no limit."""


def in_stores(problem: Problem, stores: Stores) -> Problem:
    """The same problem in other stores."""
    return with_graph_of(replace(problem, stores=stores), problem)


def with_graph_of(problem: Problem, other: Problem) -> Problem:
    """`problem`, with the stage graph of `other`, which has the same one, if that has been made."""
    vars(problem).update({name: made for name, made in vars(other).items() if name == "stage_graph"})
    return problem


def allowed(spec: PlatformSpec, asked: str) -> tuple[str, ...]:
    """The stores that may be taken where `asked` is a name or "auto"; raises InvalidValue for an unknown one."""
    return spec.store_names if asked == AUTO else (spec.store(asked).name,)


def with_largest_objects(spec: PlatformSpec, asked: Stores) -> Stores:
    """The allowed stores of messages and of sums that take the largest objects: what fits in any pair fits in theirs.

    Of several such stores, the platform lists the chosen one first.
    """

    def room(name: str) -> float:
        largest = spec.store(name).largest_bytes
        return math.inf if largest is None else largest

    return Stores(messages=max(allowed(spec, asked.messages), key=room), sums=max(allowed(spec, asked.sums), key=room))


def exact_over_stores(
    problem: Problem,
    choices: Sequence[Stores],
    *,
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Plan:
    """The best plan in any of `choices`, or the best so far with a bound, as `exact` finds it in one of them."""
    started_s = clock()
    search = _PairSearch(problem, list(choices), time_limit(started_s, time_limit_s, clock))
    search.run()
    if search.best is None:
        raise explain_infeasible(problem)
    plan = search.best
    return report(plan, in_stores(problem, plan.stores), name="exact", bound=search.bound, solve_s=clock() - started_s)


class _PairSearch:
    """The pairs that are left to look into, the best plan so far, and the least that any other one may cost."""

    def __init__(self, problem: Problem, left: list[Stores], time_is_up: Callable[[], bool]) -> None:
        """Nothing is known yet of the pairs that are `left`."""
        self.problem, self.left, self.time_is_up = problem, left, time_is_up
        self.all = tuple(left)
        self.best: Plan | None = None
        self.cutoff = self.bound = math.inf
        self._tables: Tables = {}
        self._promise: dict[Stores, float] = {}

    def run(self) -> None:
        """Look into all pairs: until there is a plan, then into the most promising one, then group by group."""
        while self.left and self.best is None:
            self._search_pair(self.left[0])
        for group in self._groups():
            if len(group) > 1 and not self._must_stop():
                self._leave_out(group, alone=True)
        if not self._must_stop():
            self._promising_first()
            self._search_pair(self.left[0])
        for group in self._groups():
            while group and not self._must_stop():
                if len(group) > 1 and self._leave_out(group, alone=False):
                    break
                self._search_pair(group.pop(0))

    def _groups(self) -> list[list[Stores]]:
        stores = dict.fromkeys(pair.messages for pair in self.left)
        return [[pair for pair in self.left if pair.messages == messages] for messages in stores]

    def _must_stop(self) -> bool:
        """Return whether time is up: nothing is known then of plans in the pairs that are left."""
        if self.left and self.best is not None and self.time_is_up():
            self.bound, self.left = 0.0, []
        return not self.left

    def _search_pair(self, stores: Stores) -> None:
        self.left.remove(stores)
        problem = in_stores(self.problem, stores)
        search = search_below(problem, self.cutoff, self.time_is_up, self._spaces(problem, [stores]))
        self.bound = min(self.bound, search.bound)
        if search.found:
            self.best = search.found[-1].plan(problem)
            self.cutoff = min(self.cutoff, search.incumbents.best)

    def _leave_out(self, group: list[Stores], *, alone: bool) -> bool:
        """Leave out a group of pairs, with the same store for messages, if no plan in them can be better; or say no.

        They are searched together, as if there were a store for sums with the best of each of theirs; and with `alone`
        as if each function had the stores for itself. A plan that is found shows what to expect of them. Where it costs
        no more in one of the pairs, the search goes on.
        """
        problem = _in_best_of(self.problem, group)
        if alone:
            problem = with_graph_of(replace(problem, spec=problem.spec.unshared()), problem)
        search = Search(
            problem, incumbents_for(problem.goal, self.cutoff), self.time_is_up, among=self._spaces(problem, group)
        )
        known = 0

        def stops() -> bool:
            nonlocal known
            if len(search.found) > known:
                known, plan = len(search.found), search.found[-1].plan(problem)
                for stores in group:
                    self._price(plan, stores)
            return self.cutoff > search.incumbents.best * (1 + _ROUNDING) or self.time_is_up()

        search.time_is_up = stops
        search.run()
        if stops() or not search.complete:
            return False
        self.bound = min(self.bound, search.bound)
        self.left = [pair for pair in self.left if pair not in group]
        return True

    def _spaces(self, problem: Problem, group: Sequence[Stores]) -> Iterator[Space]:
        """The spaces of a problem. Plans in which nothing is summed are searched where all is in one store."""
        graph, settings = problem.stage_graph, problem.settings()
        elsewhere = [Stores(messages=pair.messages, sums=pair.messages) for pair in group]
        if not problem.profile.ties and all(one in self.all and one not in group for one in elsewhere):
            settings = tuple(setting for setting in settings if setting.replicas > 1)
        return spaces(problem, graph, settings=settings, tables=self._tables)

    def _promising_first(self) -> None:
        """Sort the pairs by what plans known would cost in them."""
        if self.best is not None:
            for stores in self.left:
                self._price(self.best, stores)
        self.left.sort(key=lambda stores: self._promise.get(stores, math.inf))

    def _price(self, plan: Plan, stores: Stores) -> None:
        """Price `plan` in a pair of stores; it is the best one if it costs less than that."""
        moved = replace(plan, stores=stores, prices_note=self.problem.spec.prices_note(stores))
        moved = replace(moved, estimate=evaluate(moved, self.problem.profile, self.problem.spec))
        objective = self.problem.goal.of_plan(moved)
        self._promise[stores] = min(objective, self._promise.get(stores, math.inf))
        if objective < self.cutoff and self._fits(moved):
            self.best, self.cutoff = moved, objective

    def _fits(self, plan: Plan) -> bool:
        try:
            check_objects(plan, self.problem.profile, self.problem.spec)
        except PlanError:
            return False
        return True


def _in_best_of(problem: Problem, group: Sequence[Stores]) -> Problem:
    """The problem with a store for sums in which no plan costs more than in any pair of `group`."""
    spec, messages = problem.spec, group[0].messages
    stores = [spec.store(pair.sums) for pair in group]

    def least(name: str) -> Any:
        return min(getattr(store, name) for store in stores)

    def most(name: str) -> Any:
        values = [getattr(store, name) for store in stores]
        return None if None in values else max(values)

    best = StoreSpec(
        name="best of " + ", ".join(store.name for store in stores),
        what="the best of each",
        **{name: least(name) for name in STORE_COSTS},
        **{name: most(name) for name in STORE_LIMITS},
        price_usd_h=min(spec.stores_usd_h(pair) for pair in group) - spec.store(messages).price_usd_h,
    )
    other = replace(spec, stores=(*spec.stores, best))
    return with_graph_of(replace(problem, spec=other, stores=Stores(messages=messages, sums=best.name)), problem)


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
    """Return whether no plan is worse in `pair` than in `other`."""
    kinds = ((pair.messages, other.messages), (pair.sums, other.sums))
    stores = all(_store_is_as_good(spec.store(a), spec.store(b)) for a, b in kinds)
    return stores and spec.stores_usd_h(pair) <= spec.stores_usd_h(other)


def _store_is_as_good(store: StoreSpec, other: StoreSpec) -> bool:
    """Return whether `store` is no slower, dearer (hours aside) or more limited than `other`."""

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
    loads, (first, each) = plan_loads(plan, profile, spec), plan.saved_values
    whole = first * loads.parameter_bytes  # what is frozen lies in the base
    others, part = plan.replicas - 1 if each else 0, each * loads.parameter_bytes
    up, _ = link(loads, store, len(plan.stages) * (1 + others))
    seconds = float((whole / up).max()) + 2 * store.latency_s  # the files side by side, then the manifest
    puts = sum(checkpoint_files(one) + 1 for one in whole.tolist())
    puts += others * sum(checkpoint_files(one) + 1 for one in part.tolist())
    sent_bytes = float(whole.sum() + others * part.sum())
    storage_usd = store.request_usd(puts, 0) + store.transfer_usd(sent_bytes, 0.0)
    worth_usd_s = plan.replicas * float(loads.price_usd_s.sum()) + problem.goal.time_value_usd_s
    return float(dollars(worth_usd_s, seconds, storage_usd))
