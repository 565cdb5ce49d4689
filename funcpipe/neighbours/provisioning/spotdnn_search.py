"""spotDNN's search among machines: a window over a sorted list, extended where that finds none; and revocations.

`window_search` is the paper's. `improved` is ours: from the best windows it goes on by single changes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from funcpipe.core.provision import SERVER_ROLE, CostItem, Provision, Rented
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.neighbours.provisioning.goal import Goal, no_way
from funcpipe.neighbours.provisioning.result import provision, what_binds
from funcpipe.neighbours.provisioning.spotdnn import (
    Counts,
    SpotPrediction,
    SpotSystem,
    SpotType,
    fewest_workers,
    iteration_s,
    most_workers,
    predict,
)

ENUMERATED = 20_000
"""The most combinations that are all tried where the search has found nothing."""

_STARTS = 6

Score = Callable[[SpotPrediction], float]


class Space:
    """All combinations of machines beside `existing` ones, and their predictions, each made once."""

    def __init__(
        self, types: Sequence[SpotType], system: SpotSystem, goal: Goal, existing: Counts | None = None
    ) -> None:
        self.types, self.system, self.goal = tuple(types), system, goal
        self.existing = existing or (0,) * len(self.types)
        if len(self.existing) != len(self.types):
            raise InvalidValue("existing", self.existing, f"must have a number for each of the {len(self.types)} types")
        self.quotas = tuple(max(kind.quota, have) for kind, have in zip(self.types, self.existing, strict=True))
        self._known: dict[Counts, SpotPrediction | None] = {}

    def predicted(self, counts: Counts) -> SpotPrediction | None:
        """The prediction for these machines, existing ones included; None for none, or where they do not converge."""
        if counts not in self._known:
            try:
                self._known[counts] = predict(counts, self.types, self.system, self.goal) if any(counts) else None
            except Infeasible:
                self._known[counts] = None
        return self._known[counts]

    def makes_it(self, found: SpotPrediction | None) -> bool:
        """Return True if `found` meets the deadline."""
        return found is not None and found.seconds <= self.goal.deadline_s

    @property
    def size(self) -> int:
        """The number of combinations."""
        return math.prod(most - have + 1 for most, have in zip(self.quotas, self.existing, strict=True))

    def all_counts(self) -> Iterator[Counts]:
        """Every combination."""
        return product(*(range(have, most + 1) for have, most in zip(self.existing, self.quotas, strict=True)))


def windows(space: Space, fewest: int, most: int) -> Iterator[SpotPrediction]:
    """Neighbours in the list of available machines, slowest iterations first, for each number of machines."""
    order = sorted(range(len(space.types)), key=lambda i: -iteration_s(space.types[i], 1, space.system))
    listed = [i for i in order for _ in range(space.quotas[i] - space.existing[i])]
    have = sum(space.existing)
    for workers in range(max(fewest, have), min(most, have + len(listed)) + 1):
        added = workers - have
        for first in range(len(listed) - added + 1):
            counts = list(space.existing)
            for i in listed[first : first + added]:
                counts[i] += 1
            found = space.predicted(tuple(counts))
            if found is not None:
                yield found


def window_search(space: Space) -> SpotPrediction | None:
    """The paper's algorithm: the cheapest window that makes it, between the bounds (15) and (16)."""
    found = windows(space, fewest_workers(space.types, space.system, space.goal), most_workers(space.system))
    return min(filter(space.makes_it, found), key=_usd, default=None)


def exhaustive_search(space: Space) -> SpotPrediction | None:
    """The cheapest of all combinations that makes it: the oracle."""
    return min((found for counts in space.all_counts() if (found := _makes(space, counts))), key=_usd, default=None)


def improved(
    space: Space, start: SpotPrediction, score: Score, allowed: Callable[[SpotPrediction], bool]
) -> SpotPrediction:
    """Improve `start` by the best single change (one machine more, one less, one for another) until none is better."""
    best = start
    while True:
        near = (found for counts in _neighbours(space, best.counts) if (found := space.predicted(counts)))
        better = min(filter(allowed, near), key=score, default=None)
        if better is None or score(better) >= score(best) * (1 - 1e-9):
            return best
        best = better


def extended_search(space: Space) -> SpotPrediction | None:
    """Windows of any length, improved; where none makes it: the quickest ones, hurried; then all combinations."""
    ends = (0, sum(space.quotas))
    starts = _best_by_workers(filter(space.makes_it, windows(space, *ends)))
    if not starts:
        quickest = _best_by_workers(windows(space, *ends), key=_seconds)
        hurried = [improved(space, one, _seconds, lambda found: True) for one in quickest[:_STARTS]]
        starts = [one for one in hurried if space.makes_it(one)]
    found = [improved(space, one, _usd, space.makes_it) for one in starts[:_STARTS]]
    if not found and space.size <= ENUMERATED:
        return exhaustive_search(space)
    return min(found, key=_usd, default=None)


def spotdnn(
    goal: Goal,
    types: Sequence[SpotType],
    system: SpotSystem,
    *,
    published: bool = False,
    existing: Counts | None = None,
    replace_s: float = 0.0,
) -> Provision:
    """spotDNN's choice among `types`, beside `existing` machines; `published` searches exactly as the paper does."""
    if not types:
        raise Infeasible("spotdnn: no machine of the market has a spot price and memory for the model; add one")
    goal.check()
    space = Space(types, system, goal, existing)
    found = window_search(space) if published else extended_search(space)
    if found is None:
        quickest = min((one.seconds for one in windows(space, 0, sum(space.quotas))), default=None)
        raise no_way("spotdnn", goal, quickest, f"the {sum(space.quotas)} machines of the market")
    why = "the cheapest window of machines of like speed" + ("" if published else ", improved by single changes")
    return spot_provision("spotdnn", goal, found, space, why=why, replace_s=replace_s)


def replan(
    goal: Goal,
    types: Sequence[SpotType],
    system: SpotSystem,
    survivors: Counts,
    *,
    done: float,
    remaining_s: float,
    overhead_s: float = 30.0,
) -> Provision:
    """The machines to rent beside `survivors` after a revocation, when the share `done` of the normalised work is done.

    Machines that join take `overhead_s`, below 30 s in the paper; the goal's deadline becomes what remains of it.
    """
    if not 0 <= done < 1:
        raise InvalidValue("done", done, "must be at least 0 and below 1")
    left = replace(goal, deadline_s=remaining_s, left=goal.left * (1 - done))
    later = replace(system, start_s=overhead_s)
    return spotdnn(left, types, later, existing=survivors)


def spot_provision(
    way: str, goal: Goal, found: SpotPrediction, space: Space, *, why: str, replace_s: float
) -> Provision:
    """The record of a combination of spot machines and their server."""
    hours, system = found.seconds / 3600, space.system
    chosen = [(count, kind) for count, kind in zip(found.counts, space.types, strict=True) if count]
    busy = sum(found.counts) * system.request_mb_s > system.server_mb_s
    losses_s = sum(count * kind.losses_s for count, kind in chosen)
    return provision(
        way,
        goal,
        rented=[
            *(Rented(name=kind.name, count=count, spot=True) for count, kind in chosen),
            Rented(name=system.server, count=1, role=SERVER_ROLE),
        ],
        seconds=found.seconds,
        start_s=system.start_s,
        iterations=found.steps,
        cost=[
            *(CostItem(name=kind.name, usd=count * kind.usd_h * hours) for count, kind in chosen),
            CostItem(name="server", usd=system.server_usd_h * hours),
        ],
        binds="the server's network" if busy else what_binds(found.seconds, goal.deadline_s),
        why=why,
        cluster=found.cluster,
        losses_s=losses_s,
        delay_s=replace_s,
    )


def _makes(space: Space, counts: Counts) -> SpotPrediction | None:
    found = space.predicted(counts)
    return found if space.makes_it(found) else None


def _neighbours(space: Space, counts: Counts) -> Iterator[Counts]:
    for add in (None, *range(len(counts))):
        for drop in (None, *range(len(counts))):
            if add == drop:
                continue
            changed = list(counts)
            if add is not None:
                changed[add] += 1
            if drop is not None:
                changed[drop] -= 1
            if all(low <= n <= high for low, n, high in zip(space.existing, changed, space.quotas, strict=True)):
                yield tuple(changed)


def _usd(found: SpotPrediction) -> float:
    return found.usd


def _seconds(found: SpotPrediction) -> float:
    return found.seconds


def _best_by_workers(found: Iterator[SpotPrediction], key: Score = _usd) -> list[SpotPrediction]:
    """The best prediction for each number of workers, the best of all first."""
    best: dict[int, SpotPrediction] = {}
    for one in found:
        known = best.get(one.cluster.workers)
        if known is None or key(one) < key(known):
            best[one.cluster.workers] = one
    return sorted(best.values(), key=key)
