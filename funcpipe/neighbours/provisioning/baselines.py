"""Baselines of λDNN on the same functions: naive, a stand-in for Siren, and all configurations."""

import math
import random

from funcpipe.core.provision import Provision
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.goal import Goal, no_way
from funcpipe.neighbours.provisioning.lambdadnn import (
    FunctionMarket,
    FunctionPrediction,
    FunctionWorkload,
    enumerated,
    fastest_s,
    function_provision,
    memories,
    predicted_or_none,
    require_memory,
)

_ROUNDS, _DRAWS, _ELITE = 20, 40, 8


def naive(goal: Goal, work: FunctionWorkload, market: FunctionMarket, *, seed: int = 0) -> Provision:
    """The largest functions, and a random number of them that the server's link can feed; it may miss the deadline."""
    goal.check()
    require_memory("naive", work, market)
    most = max(1, math.floor(market.server_mb_s / market.function_mb_s))
    functions = random.Random(seed).randint(1, min(most, market.max_functions))
    found = predicted_or_none(functions, memories(work, market)[-1], goal.synchronous_samples(), work, market)
    if found is None:
        raise Infeasible(f"naive: {functions} functions of the largest memory cannot do it; take another seed")
    return function_provision(
        "naive", goal, found, market, why=f"the largest memory, a random number of functions (seed {seed})"
    )


def siren_like(goal: Goal, work: FunctionWorkload, market: FunctionMarket, *, seed: int = 0) -> Provision:
    """A stand-in for "modified Siren": the cheapest configuration in time that a learned random policy has drawn.

    Siren (Wang et al., INFOCOM 2019) learns the number and memory of functions by deep reinforcement learning. Here the
    policy is a normal distribution over both, moved towards its best draws (the cross-entropy method).
    """
    goal.check()
    require_memory("siren-like", work, market)
    found = _learned(goal, work, market, random.Random(seed))
    if found is None:
        raise no_way(
            "siren-like", goal, None, f"none of {_ROUNDS * _DRAWS} draws makes the deadline of {goal.deadline_s:.0f} s"
        )
    return function_provision(
        "siren-like", goal, found, market, why=f"the best of {_ROUNDS * _DRAWS} draws (seed {seed})"
    )


def exhaustive(goal: Goal, work: FunctionWorkload, market: FunctionMarket, *, count_server: bool = True) -> Provision:
    """The cheapest of all numbers and memories of functions."""
    goal.check()
    require_memory("exhaustive-functions", work, market)
    samples = goal.synchronous_samples()
    found = enumerated(samples, goal.deadline_s, work, market, count_server=count_server)
    if found is None:
        raise no_way(
            "exhaustive-functions", goal, fastest_s(samples, work, market), "all numbers and sizes of functions"
        )
    return function_provision(
        "exhaustive-functions", goal, found, market, why="all numbers and sizes of functions were tried"
    )


def _learned(
    goal: Goal, work: FunctionWorkload, market: FunctionMarket, draw: random.Random
) -> FunctionPrediction | None:
    """The best draw that makes the deadline; draws that do not count as worse the later they are."""
    samples, sizes = goal.synchronous_samples(), memories(work, market)
    mean, spread = [math.log(4.0), len(sizes) / 2], [1.0, len(sizes) / 3]
    best: FunctionPrediction | None = None
    for _ in range(_ROUNDS):
        scored: list[tuple[float, float, float]] = []
        for _ in range(_DRAWS):
            x, y = draw.gauss(mean[0], spread[0]), draw.gauss(mean[1], spread[1])
            functions = min(max(round(math.exp(min(x, 12.0))), 1), market.max_functions)
            found = predicted_or_none(functions, sizes[min(max(round(y), 0), len(sizes) - 1)], samples, work, market)
            if found is None:
                continue
            late = found.seconds > goal.deadline_s
            scored.append((1e6 * found.seconds / goal.deadline_s if late else found.usd(server=True), x, y))
            if not late and (best is None or found.usd(server=True) < best.usd(server=True)):
                best = found
        elite = sorted(scored)[:_ELITE]
        if elite:
            for axis in (0, 1):
                values = [one[axis + 1] for one in elite]
                mean[axis] = sum(values) / len(values)
                spread[axis] = max(math.sqrt(sum((v - mean[axis]) ** 2 for v in values) / len(values)), 0.05)
    return best
