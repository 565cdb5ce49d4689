"""λDNN (Xu et al., IEEE Trans. Computers 71(2), 2022): data-parallel functions with a parameter server on a machine.

The equations' numbers are those of the paper. MB and MB/s are its units. Below it are its baselines on the same
functions: naive, a stand-in for Siren, and all configurations.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from funcpipe.core.provision import SERVER_ROLE, CostItem, Provision, Rented
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.goal import Goal, no_way, provision, what_binds

_FUNCTIONS = re.compile(r"(\d+)MB \S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionWorkload:
    """λDNN's measurements of a model: `rate` is in samples a second of one function, `store` in MB a second.

    Both are linear in a function's memory in MB; what storage gives does not grow beyond `store_flat_mb`.
    """

    dataset_mb: float
    model_mb: float
    local_batch: int
    global_batch: int
    rate_slope: float
    rate_base: float
    store_slope: float
    store_base: float
    memory_min_mb: int
    store_flat_mb: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMarket:
    """λDNN's view of the platform: bandwidths, sizes, prices and limits of functions, and the server's price.

    With `lifetime_s`, functions save a checkpoint `margin_s` before they end, and are launched again in `relaunch_s`.
    """

    server_mb_s: float
    function_mb_s: float
    store_mb_s: float
    memory_max_mb: int
    memory_step_mb: int
    usd_gb_s: float
    server_usd_s: float
    max_functions: int = 1000
    start_s: float = 0.0
    lifetime_s: float | None = None
    relaunch_s: float = 6.0
    margin_s: float = 30.0
    function: str = "function"
    server: str = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPrediction:
    """The predicted time and cost of `functions` functions of `memory_mb`."""

    functions: int
    memory_mb: int
    seconds: float
    iterations: float
    iteration_s: float
    functions_usd: float
    server_usd: float
    relaunches: int

    def usd(self, *, server: bool) -> float:
        """Dollars, with those of the server or without."""
        return self.functions_usd + (self.server_usd if server else 0.0)


def predict(
    functions: int, memory_mb: int, samples: float, work: FunctionWorkload, market: FunctionMarket
) -> FunctionPrediction:
    """Time and cost by equations (1) to (10), training on `samples` samples in all (n_t·e)."""
    rate = work.rate_slope * memory_mb + work.rate_base  # (6)
    if rate <= 0:
        raise Infeasible(f"λDNN: a function of {memory_mb} MB makes no progress by the measured rate; take larger ones")
    store_mb_s = store_bandwidth(memory_mb, work, market)  # (8)
    server_mb_s = min(market.function_mb_s, market.server_mb_s / functions)  # (7)
    local = work.local_batch if work.local_batch * functions <= work.global_batch else work.global_batch / functions
    iterations = samples / (local * functions)  # (2), (9)
    load_s = work.dataset_mb / (functions * store_mb_s)  # (3)
    iteration_s = local / rate + 2 * work.model_mb / server_mb_s  # (4), (5)
    relaunches = relaunch_count(iterations, iteration_s, market.start_s + load_s, market)
    extra_s = market.start_s + relaunches * market.relaunch_s
    seconds = load_s + iterations * iteration_s + extra_s  # (1)
    return FunctionPrediction(
        functions=functions,
        memory_mb=memory_mb,
        seconds=seconds,
        iterations=iterations,
        iteration_s=iteration_s,
        functions_usd=memory_mb / 1024 * functions * market.usd_gb_s * seconds,  # (10)
        server_usd=market.server_usd_s * seconds,
        relaunches=relaunches,
    )


def store_bandwidth(memory_mb: int, work: FunctionWorkload, market: FunctionMarket) -> float:
    """MB a second between a function and storage, by equation (8)."""
    return min(work.store_slope * min(memory_mb, work.store_flat_mb) + work.store_base, market.store_mb_s)


def relaunch_count(iterations: float, iteration_s: float, first_s: float, market: FunctionMarket) -> int:
    """The relaunches of all functions, as whole iterations must fit before their lifetime's margin."""
    if market.lifetime_s is None:
        return 0
    usable_s = market.lifetime_s - market.margin_s
    fits_first = math.floor((usable_s - first_s) / iteration_s)
    fits = math.floor((usable_s - market.relaunch_s) / iteration_s)
    if min(fits_first, fits) < 1:
        raise Infeasible(
            f"λDNN: an iteration of {iteration_s:.0f} s does not fit into a function's lifetime of "
            f"{market.lifetime_s:.0f} s; take more functions, or a smaller batch"
        )
    return max(0, math.ceil((iterations - fits_first) / fits))


def bounds(
    memory_mb: int, samples: float, deadline_s: float, work: FunctionWorkload, market: FunctionMarket
) -> tuple[int, int]:
    """The fewest and the most functions to consider, by equations (15) and (14).

    Raises Infeasible if the target is unreachable at this memory: b_g·κ ≤ μ, which the paper does not guard.
    """
    rate = work.rate_slope * memory_mb + work.rate_base
    store, link = store_bandwidth(memory_mb, work, market), market.function_mb_s
    upper = math.floor(market.server_mb_s / market.function_mb_s)  # (14)
    if math.isinf(deadline_s):
        return 1, upper
    lam = link * (rate * work.dataset_mb + samples * store)
    kappa = deadline_s * rate * store * link
    mu = 2 * work.model_mb * samples * store * rate
    lower = math.ceil(lam / kappa + mu / (work.local_batch * kappa))
    if work.local_batch * lower <= work.global_batch:
        return max(lower, 1), upper
    if work.global_batch * kappa <= mu:
        raise Infeasible(
            f"λDNN: with functions of {memory_mb} MB, exchanging the model takes "
            f"{mu / kappa / work.global_batch * deadline_s:.0f} s alone, the deadline is {deadline_s:.0f} s; "
            "allow more time or a larger global batch"
        )
    lower = math.ceil(work.global_batch * lam / (work.global_batch * kappa - mu))
    return max(math.floor(work.global_batch / work.local_batch), lower, 1), upper


def search(
    samples: float, deadline_s: float, work: FunctionWorkload, market: FunctionMarket, *, count_server: bool
) -> FunctionPrediction | None:
    """Algorithm 1 of the paper: for each memory the smallest number of functions that makes it and beats the best."""
    best: FunctionPrediction | None = None
    for memory_mb in memories(work, market):
        for found in _ascending(memory_mb, samples, deadline_s, work, market):
            if found.seconds <= deadline_s and (
                best is None or found.usd(server=count_server) < best.usd(server=count_server)
            ):
                best = found
                break
    return best


def enumerated(
    samples: float, deadline_s: float, work: FunctionWorkload, market: FunctionMarket, *, count_server: bool
) -> FunctionPrediction | None:
    """The cheapest of all memories and numbers of functions that makes it: the oracle, and the way out of `search`."""
    best: FunctionPrediction | None = None
    for memory_mb in memories(work, market):
        for found in _worthwhile(memory_mb, samples, work, market):
            if found.seconds > deadline_s:
                continue
            if best is None or found.usd(server=count_server) < best.usd(server=count_server):
                best = found
    return best


def predicted_or_none(
    functions: int, memory_mb: int, samples: float, work: FunctionWorkload, market: FunctionMarket
) -> FunctionPrediction | None:
    """`predict`, or None where that many functions of that memory cannot do it."""
    try:
        return predict(functions, memory_mb, samples, work, market)
    except Infeasible:
        return None


def memories(work: FunctionWorkload, market: FunctionMarket) -> range:
    """The memories to choose from."""
    return range(work.memory_min_mb, market.memory_max_mb + 1, market.memory_step_mb)


def require_memory(way: str, work: FunctionWorkload, market: FunctionMarket) -> None:
    """Raise Infeasible if no function can hold the whole model."""
    if not memories(work, market):
        raise Infeasible(
            f"{way}: every function holds the whole model, which needs {work.memory_min_mb} MB, and the largest has "
            f"{market.memory_max_mb} MB; cut the model (the way funcpipe), or take a smaller micro-batch"
        )


def lambdadnn(goal: Goal, work: FunctionWorkload, market: FunctionMarket, *, count_server: bool = False) -> Provision:
    """λDNN's choice. The search counts the server's price if `count_server`; the bill always does, as in the paper.

    Equation (14) keeps the server's link from saturating, but more functions may still be what makes the deadline:
    where the paper's search finds nothing, all configurations are tried.
    """
    samples, deadline_s = goal.synchronous_samples(), goal.deadline_s
    require_memory("λDNN", work, market)
    found = search(samples, deadline_s, work, market, count_server=count_server)
    why = "the cheapest by Algorithm 1, " + ("with" if count_server else "without") + " the server's price"
    if found is None:
        found = enumerated(samples, deadline_s, work, market, count_server=count_server)
        why = "Algorithm 1 finds none below the server's saturation, so every number of functions was tried"
    if found is None:
        raise no_way("λDNN", goal, fastest_s(samples, work, market), "all numbers and sizes of functions")
    return function_provision("lambdadnn", goal, found, market, why=why)


def fastest_s(samples: float, work: FunctionWorkload, market: FunctionMarket) -> float | None:
    """The least time that the largest functions need."""
    largest = memories(work, market)[-1]
    return min((found.seconds for found in _worthwhile(largest, samples, work, market)), default=None)


def function_provision(
    way: str, goal: Goal, found: FunctionPrediction, market: FunctionMarket, *, why: str
) -> Provision:
    """The record of functions with a parameter server."""
    saturated = found.functions * market.function_mb_s > market.server_mb_s
    binds = "the server's network" if saturated else what_binds(found.seconds, goal.deadline_s)
    return provision(
        way,
        goal,
        rented=[
            rented_functions(found.functions, found.memory_mb, market.function),
            Rented(name=market.server, count=1, role=SERVER_ROLE),
        ],
        seconds=found.seconds,
        start_s=market.start_s,
        iterations=found.iterations,
        cost=[CostItem(name="functions", usd=found.functions_usd), CostItem(name="server", usd=found.server_usd)],
        binds=binds,
        why=why,
    )


def rented_functions(count: int, memory_mb: int, platform: str) -> Rented:
    """So many functions of a platform."""
    return Rented(name=f"{memory_mb}MB {platform}", count=count)


def memory_of(rented: Rented) -> int | None:
    """The memory of the functions in `rented`, in MB; None if it is machines."""
    match = _FUNCTIONS.fullmatch(rented.name)
    return None if match is None else int(match[1])


def _ascending(
    memory_mb: int, samples: float, deadline_s: float, work: FunctionWorkload, market: FunctionMarket
) -> Iterator[FunctionPrediction]:
    try:
        lower, upper = bounds(memory_mb, samples, deadline_s - market.start_s, work, market)
    except Infeasible:
        return
    for functions in range(lower, min(upper, market.max_functions) + 1):
        found = predicted_or_none(functions, memory_mb, samples, work, market)
        if found is not None:
            yield found


def _worthwhile(
    memory_mb: int, samples: float, work: FunctionWorkload, market: FunctionMarket
) -> Iterator[FunctionPrediction]:
    """The predictions for all numbers of functions, until more of them only make the job longer, and so dearer.

    Once the server is saturated and the global batch full, the time is a/n + c·n and a constant: it falls, then rises.
    """
    settled = max(market.server_mb_s / market.function_mb_s, work.global_batch / work.local_batch)
    before: FunctionPrediction | None = None
    for functions in range(1, market.max_functions + 1):
        found = predicted_or_none(functions, memory_mb, samples, work, market)
        if functions > settled + 1 and before is not None and (found is None or found.seconds > before.seconds):
            return
        before = found or before
        if found is not None:
            yield found


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
