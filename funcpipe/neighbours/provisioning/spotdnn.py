"""spotDNN's model (Shang et al., IWQoS 2023): asynchronous workers of different speeds around a parameter server.

The equations' numbers are those of the paper. MB and MB/s are its units. Its search is a window over a sorted list of
machines (`window_search`); ours (`extended_search`) goes on from the best windows by single changes (`improved`), and
finds more where no window makes the deadline. `replan` is for machines that are taken back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from funcpipe.core import checks
from funcpipe.core.provision import SERVER_ROLE, CostItem, Provision, Rented
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.neighbours.provisioning.goal import Cluster, Goal, no_way, provision, what_binds


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotType:
    """A type of machine as spotDNN sees it: its batch, the seconds that this computes, its GPUs, price and quota."""

    name: str
    batch: int
    compute_s: float
    gpus: int
    usd_h: float
    quota: int
    losses_s: float = 0.0

    def __post_init__(self) -> None:
        checks.whole("batch", self.batch, 1)
        checks.positive("compute_s", self.compute_s)
        checks.whole("quota", self.quota, 0)
        checks.positive("usd_h", self.usd_h)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSystem:
    """The model and the network: `model_mb` (S_parm), what a worker asks for (B_req), the server's link and PCIe.

    `contention_slope` and `contention_base` are α1 and β1 of equation (9); `margin` over-predicts contention, by 0.01
    to 0.05 in the paper. `server_usd_h` is billed only if `count_server`: equation (11) leaves it out.
    """

    model_mb: float
    request_mb_s: float
    server_mb_s: float
    pcie_mb_s: float = 10_000.0
    contention_slope: float = 0.8
    contention_base: float = -1.92
    margin: float = 0.0
    server: str = "server"
    server_usd_h: float = 0.0
    count_server: bool = False
    start_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("model_mb", "request_mb_s", "server_mb_s", "pcie_mb_s", "contention_slope"):
            checks.positive(name, getattr(self, name))
        if self.contention_base >= 1:
            raise InvalidValue("contention_base", self.contention_base, "must be below 1: workers alone do not contend")


Counts = tuple[int, ...]
"""The number of machines of each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrediction:
    """The predicted time and cost of `counts` machines of each type; searches compare `usd`."""

    counts: Counts
    seconds: float
    usd: float
    steps: float
    step_s: float
    cluster: Cluster


def contention(workers: int, system: SpotSystem) -> float:
    """The chance that workers contend for the server's link, by equation (9), kept within [0, 1]."""
    raw = system.contention_slope * math.sqrt(workers) + system.contention_base
    return min(max(raw, 0.0) * (1 + system.margin), 1.0)


def worker_bandwidth(workers: int, system: SpotSystem) -> float:
    """MB a second between one of `workers` workers and the server, by equation (8)."""
    share = system.server_mb_s / workers
    if system.request_mb_s <= share:
        return system.request_mb_s
    chance = contention(workers, system)
    return chance * share + (1 - chance) * system.request_mb_s


def communication_s(kind: SpotType, bandwidth_mb_s: float, system: SpotSystem) -> float:
    """Pulling parameters and pushing gradients, over the network and over PCIe to each GPU, by equation (7)."""
    return 2 * system.model_mb / bandwidth_mb_s + 2 * kind.gpus * system.model_mb / system.pcie_mb_s


def iteration_s(kind: SpotType, workers: int, system: SpotSystem) -> float:
    """Seconds of one iteration of a machine among `workers`, by equation (6)."""
    return kind.compute_s + communication_s(kind, worker_bandwidth(workers, system), system)


def cluster_of(counts: Counts, types: Sequence[SpotType], system: SpotSystem) -> tuple[Cluster, float]:
    """The weighted batch, the convergence coefficient and the seconds of a normalised iteration: (2), (4), (5).

    The fastest worker is the first of equation (5), which the paper does not say; its figure 3b fits.
    """
    workers = sum(counts)
    rate, speed, squares, fastest = 0.0, 0.0, 0.0, 0.0
    for count, kind in zip(counts, types, strict=True):
        if count:
            each_s = iteration_s(kind, workers, system)
            own = kind.batch / each_s
            rate += count / each_s
            speed += count * own
            squares += count * own * own
            fastest = max(fastest, own)
    convergence = math.sqrt(max(squares / speed**2 - 2 * fastest / speed + 1, 0.0)) if workers > 1 else 0.0
    return Cluster(batch=speed / rate, workers=workers, convergence=convergence), 1 / rate


def predict(counts: Counts, types: Sequence[SpotType], system: SpotSystem, goal: Goal) -> SpotPrediction:
    """Time and cost by equations (1) and (11); raises Infeasible if the loss is out of reach."""
    cluster, step_s = cluster_of(counts, types, system)
    steps = goal.asynchronous_steps(cluster)
    seconds = steps * step_s + system.start_s
    usd_h = sum(count * kind.usd_h for count, kind in zip(counts, types, strict=True))
    if system.count_server:
        usd_h += system.server_usd_h
    return SpotPrediction(
        counts=counts, seconds=seconds, usd=seconds * usd_h / 3600, steps=steps, step_s=step_s, cluster=cluster
    )


def most_workers(system: SpotSystem) -> int:
    """Equation (15): with more workers, contention would be certain."""
    return math.floor(((1 - system.contention_base) / system.contention_slope) ** 2)


def fewest_workers(types: Sequence[SpotType], system: SpotSystem, goal: Goal) -> int:
    """Equation (16), with the convergence term of the smallest batch alone on one worker (R + γ4 taken as at R = 0).

    It is a lower bound only if the samples that a loss needs grow with the batch; the search falls back where not.
    """
    if math.isinf(goal.deadline_s):
        return 1
    smallest = min(kind.batch for kind in types)
    fastest = max(kind.batch / iteration_s(kind, 1, system) for kind in types)
    steps = goal.asynchronous_steps(Cluster(batch=smallest, workers=1, convergence=0.0))
    return max(1, math.ceil(smallest * steps / (fastest * max(goal.deadline_s - system.start_s, 1e-9))))


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
