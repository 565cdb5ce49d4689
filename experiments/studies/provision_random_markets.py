"""Every search against all combinations on random markets: dollars above the best, and processor seconds.

python -m experiments.studies.provision_random_markets [NUMBER]
"""

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from funcpipe.core.job_spec import JobSpec
from funcpipe.core.provision import Provision
from funcpipe.errors import Infeasible
from funcpipe.provision import cynthia, lambdadnn
from funcpipe.provision.goal import Goal
from funcpipe.provision.spotdnn import SpotPrediction, SpotType
from funcpipe.provision.spotdnn_search import Space, exhaustive_search, extended_search, window_search
from tests.provision.published import LAMBDA, MOBILE_NET, SPOT, spot_goal, spot_types
from tests.provision.random_markets import random_clusters, random_functions, random_market

Found = float | None
"""Dollars of what a search has found."""

SpotSearch = Callable[[Space], SpotPrediction | None]


def spot(seed: int) -> dict[str, Found]:
    types, system, goal = random_market(random.Random(seed))
    searches = {"best": exhaustive_search, "window (published)": window_search, "extended": extended_search}
    found = {name: search(Space(types, system, goal)) for name, search in searches.items()}
    return {name: None if one is None else one.usd for name, one in found.items()}


def functions(seed: int) -> dict[str, Found]:
    samples, deadline_s, work, market = random_functions(random.Random(seed))
    best, published = (
        search(samples, deadline_s, work, market, count_server=False)
        for search in (lambdadnn.enumerated, lambdadnn.search)
    )
    job = JobSpec(samples=math.ceil(samples), global_batch=work.global_batch, epochs=samples / math.ceil(samples))
    extended = found_by(lambda: lambdadnn.lambdadnn(Goal(job=job, deadline_s=deadline_s), work, market))
    return {
        "best": None if best is None else best.functions_usd,
        "Algorithm 1 (published)": None if published is None else published.functions_usd,
        "extended": None if extended is None else extended.cost[0].usd,
    }


def clusters(seed: int) -> dict[str, Found]:
    types, work, server, mode, goal = random_clusters(random.Random(seed))
    every = cynthia.enumerated(types, work=work, server=server, mode=mode, goal=goal)
    bounded = cynthia.search(types, work=work, server=server, mode=mode, goal=goal)
    extended = found_by(lambda: cynthia.cynthia(goal, types, work=work, server=server, mode=mode))
    return {
        "best": min((one.usd for one in every if one.seconds <= goal.deadline_s), default=None),
        "within the bounds": None if bounded is None else bounded.usd,
        "extended": None if extended is None else extended.usd,
    }


def found_by(way: Callable[[], Provision]) -> Provision | None:
    try:
        return way()
    except Infeasible:
        return None


def report(name: str, draw: Callable[[int], dict[str, Found]], number: int) -> None:
    cases = [draw(seed) for seed in range(number)]
    solvable = [case for case in cases if case["best"] is not None]
    print(f"{name}: {number} markets, {len(solvable)} with a provision")
    for search in [key for key in cases[0] if key != "best"]:
        pairs = [(usd, best) for case in solvable if (usd := case[search]) and (best := case["best"])]
        gaps = sorted(usd / best - 1 for usd, best in pairs)
        missed = len(solvable) - len(gaps)
        print(
            f"  {search:24} finds none in {missed:3}; dollars above the best: median {gaps[len(gaps) // 2]:.2%}, "
            f"90 % {gaps[int(0.9 * len(gaps))]:.2%}, most {gaps[-1]:.1%}"
        )


def _searched(search: SpotSearch, types: tuple[SpotType, ...], goal: Goal) -> SpotPrediction | None:
    return search(Space(types, SPOT, goal))


def processor_s(work: Callable[[], object], repeats: int = 5) -> float:
    took = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return min(took)


def speed() -> None:
    types = spot_types()
    for quota in (5, 14):
        many, goal = tuple(replace(kind, quota=quota) for kind in types), spot_goal(0.8, 2400)
        for name, search in (("window", window_search), ("extended", extended_search)):
            seconds = processor_s(partial(_searched, search, many, goal))
            print(f"spotDNN, {name}, {5 * quota} machines: {seconds:.4f} processor seconds")
    large = replace(LAMBDA, memory_max_mb=10_240)
    for server in (False, True):
        search_functions = partial(lambdadnn.search, 300_000, 1200, MOBILE_NET, large, count_server=server)
        seconds = processor_s(search_functions)
        print(f"λDNN, up to 10,240 MB, server's price {server}: {1000 * seconds:.2f} ms of a processor")


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    report("spotDNN", spot, number)
    report("λDNN", functions, number)
    report("Cynthia-style", clusters, number)
    speed()


if __name__ == "__main__":
    main()
