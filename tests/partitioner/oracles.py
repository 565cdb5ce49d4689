"""What slow oracles say of small problems, kept in `optima.json`, so that comparing does not take their time.

`python -m tests.partitioner.oracles` asks them all again, in minutes, and writes the file.
"""

import functools
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from funcpipe.core import Optimality, Plan, Stores, Sync
from funcpipe.errors import Infeasible
from funcpipe.partitioner.alternatives import pareto_front
from funcpipe.partitioner.problem.goal import LIMIT_SLACK
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.partitioner.stores import store_choices
from tests.partitioner.instances import all_points, draw_problem, front_of, with_limits
from tests.partitioner.plain_search import plain_points
from tests.partitioner.problems import (
    DATA,
    divided,
    in_16_bits,
    jointly,
    larger,
    pinned,
    tied,
    with_data,
    with_stores,
)

_FILE = Path(__file__).with_name("optima.json")

AUTO = Stores.of("auto")


@dataclass(frozen=True)
class Case:
    """What is asked for beyond the problem, such as a deadline, and the best objective; None: there is no plan."""

    asked: dict[str, float]
    objective: float | None


@dataclass(frozen=True)
class Optima:
    """What an oracle finds in a problem: the best in some cases, and seconds and dollars of the front, if asked."""

    cases: tuple[Case, ...]
    front: tuple[tuple[float, float], ...] | None = None

    @property
    def objective(self) -> float:
        """Of a problem with one case, which has a plan."""
        (case,) = self.cases
        assert case.objective is not None
        return case.objective


def compare(problem: Problem, optima: Optima) -> None:
    """The exact search proves what the oracle found, and its front is that of the oracle."""
    for case in optima.cases:
        found = _plan(exact, asked_of(problem, case.asked))
        assert (found is None) == (case.objective is None)
        if found and found.solver:
            assert found.solver.objective == pytest.approx(case.objective, rel=1e-8)
            assert found.solver.status is Optimality.OPTIMAL
    if optima.front is not None:
        front = pareto_front(problem.profile, problem.spec, problem.training)
        points = [(p.estimate.iteration_s, p.estimate.cost_usd) for p in front.plans if p.estimate]
        np.testing.assert_allclose(points, np.array(optima.front).reshape(-1, 2), rtol=1e-7)


def asked_of(problem: Problem, asked: dict[str, float]) -> Problem:
    """The problem with other data, or in other training."""
    if "load_s" in asked:
        return with_data(problem, replace(DATA, load_s=asked["load_s"]))
    return replace(problem, training=replace(problem.training, **asked))  # type: ignore[arg-type]


def _plan(policy: Callable[[Problem], Plan], problem: Problem) -> Plan | None:
    try:
        return policy(problem)
    except Infeasible:
        return None


def enumerated(problem: Problem) -> Optima:
    """By pricing every plan."""
    plan = _plan(exhaustive, problem)
    return Optima((Case({}, plan.solver.objective if plan and plan.solver else None),))


def in_all_modes(problem: Problem, seed: int) -> Optima:
    """By pricing every plan: as the problem is, with a deadline, with a budget, and the front."""
    points = all_points(problem)
    if not points:
        return Optima((Case({}, None),))
    seconds, dollars = np.array(points).T
    best = int(problem.goal.objective(seconds, dollars).argmin())
    cases = []
    for limited in with_limits(problem, points[best][0], points[best][1], seed):
        asked = {"deadline_s": limited.training.deadline_s, "budget_usd": limited.training.budget_usd}
        found = float(limited.goal.objective(seconds, dollars).min())
        objective = found if np.isfinite(found) else None
        cases.append(Case({name: value for name, value in asked.items() if value is not None}, objective))
    return Optima(tuple(cases), tuple(front_of(points)))


def by_plain_search(problem: Problem, seed: int) -> Optima:
    """For seconds of some value, with a deadline, with a budget, and the front."""
    draw = random.Random(-1 - seed)
    limit_s = problem.goal.deadline_s * (1 + LIMIT_SLACK)
    points = [point for point in plain_points(problem) if point[0] <= limit_s]
    if not points:
        return Optima((Case({}, None),))
    seconds, dollars = np.array(points).T
    deadline_s = draw.uniform(seconds.min(), seconds[dollars.argmin()])
    budget_usd = draw.uniform(dollars.min(), dollars[seconds.argmin()])
    value = draw.choice([0.0, 1.0, 3.84, 30.0, 245.0, 1000.0])
    slack = 1 + LIMIT_SLACK  # a limit may be the time of a plan, which the two searches add up in another order
    cases = (
        Case({"time_value": value}, float((dollars + value / 3600 * seconds).min())),
        Case({"deadline_s": deadline_s}, float(dollars[seconds <= deadline_s * slack].min())),
        Case({"budget_usd": budget_usd}, float(seconds[dollars <= budget_usd * slack].min())),
    )
    return Optima(cases, tuple(front_of(points)))


def with_loading(problem: Problem) -> Optima:
    """By pricing every plan, where all micro-batches take half, all and more of the best iteration to load."""
    plan = _plan(exhaustive, problem)
    if plan is None or plan.estimate is None:
        return Optima(())
    each_s = plan.estimate.iteration_s / max(1, problem.micro_batches // max(problem.degrees))
    loads = [{"load_s": share * each_s} for share in (0.5, 1.0, 1.6)]
    return Optima(tuple(replace(enumerated(asked_of(problem, load)).cases[0], asked=load) for load in loads))


def over_pairs(problem: Problem) -> Optima:
    """By pricing every plan with every pair of stores."""
    pairs = [Stores(messages=m, sums=s) for m in problem.spec.store_names for s in problem.spec.store_names]
    plans = []
    for stores in pairs:
        with suppress(Infeasible):
            plans.append(exhaustive(replace(problem, stores=stores)))
    return Optima((Case({}, min(map(problem.goal.of_plan, plans), default=None)),))


def front_over_pairs(problem: Problem) -> Optima:
    """By pricing every plan with every pair of stores that may be best."""
    free = replace(problem, training=replace(problem.training, time_value=0.0))
    pairs = store_choices(problem.spec, AUTO)
    points = sorted(point for pair in pairs for point in all_points(replace(free, stores=pair)))
    return Optima((), tuple(front_of(points)))


ALL_MODES = (*range(30), *range(1000, 1020))
JOINT = (0, 1, 2, 6, 8, 15, 19, 27)
LARGER = (*range(25), *range(1000, 1020))
SYNCS = [
    (sync, sharded)
    for sharded in (False, True)
    for sync in (None, *Sync)
    if not sharded or sync is None or sync.shares_sums
]
"""Ways of synchronising, with an optimiser that is divided over replicas or not."""


def of_sync(sync: Sync | None, sharded: bool) -> str:
    return f"16 bits {sync.value if sync else 'any'}{' divided' if sharded else ''}"


def oracles() -> dict[str, Callable[[], Optima]]:
    """What finds the optima of each name."""
    return {
        **{f"all modes {seed}": partial(in_all_modes, draw_problem(seed), seed) for seed in ALL_MODES},
        **{f"divided {seed}": partial(in_all_modes, divided(seed), seed) for seed in range(8)},
        **{f"larger {seed}": partial(by_plain_search, larger(seed), seed) for seed in LARGER},
        **{f"loading {seed}": partial(with_loading, draw_problem(seed)) for seed in range(8)},
        **{f"pairs of stores {seed}": partial(over_pairs, with_stores(seed)) for seed in range(12)},
        **{f"front of stores {seed}": partial(front_over_pairs, with_stores(seed)) for seed in range(5)},
        **{f"pinned {seed}": partial(enumerated, pinned(seed)) for seed in range(20)},
        **{of_sync(*case): partial(enumerated, in_16_bits(*case)) for case in SYNCS},
        **{f"tied, divided {sharded}": partial(enumerated, tied(sharded)) for sharded in (False, True)},
        **{f"joint loss {seed}": partial(in_all_modes, jointly(seed), seed) for seed in JOINT},
    }


@functools.cache
def _kept() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(_FILE.read_text())
    return kept


def kept_names() -> list[str]:
    return list(_kept())


def optima(name: str) -> Optima:
    """What is kept under a name of `oracles`."""
    kept = _kept()[name]
    front = kept["front"] if kept["front"] is None else tuple((s, usd) for s, usd in kept["front"])
    return Optima(tuple(Case(**case) for case in kept["cases"]), front)


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(oracle()))}" for name, oracle in oracles().items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
