"""The simulator's rules once more, slowly: every rate computed anew at every moment, tasks in plain lists."""

import math

from funcpipe.core import Resource
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.simulator.costs import Costs
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.tasks import ORDERS, SIDE_BY_SIDE, Lane, Order

LINKS = (Resource.UPLOAD, Resource.DOWNLOAD)


def fair_rates(limits: list[float], capacity: float) -> list[float]:
    """Raise the level at which all flow until `capacity` is used or every limit is reached (bisection)."""
    if sum(limits) <= capacity:
        return limits
    low, high = 0.0, capacity
    for _ in range(60):
        level = (low + high) / 2
        low, high = (level, high) if sum(min(limit, level) for limit in limits) <= capacity else (low, level)
    return [min(limit, low) for limit in limits]


def plain_ends(graph: Graph, costs: Costs, disturbances: Disturbances) -> list[float]:
    """When each task ends."""
    count = len(graph.tasks)
    ends = [math.inf] * count
    latency, body = list(costs.seconds), list(costs.body_bytes)
    resources = [task.kind.resource for task in graph.tasks]
    left = [set(needs) for needs in graph.needs]
    queues = {lane: list(positions) for lane, positions in graph.lanes().items()}
    holders: dict[Lane, int] = {}
    opened: set[int] = set()
    downloads = min(4 * len({task.replica for task in graph.tasks}), 64)
    now = 0.0
    while any(queues.values()):
        heads = []
        for lane, queue in queues.items():
            _open(graph, lane, queue, opened, left, 4 if lane.resource is Resource.UPLOAD else downloads)
            heads += _at_work(graph, lane, queue, holders, latency, left, opened)
        waiting = [i for i in heads if latency[i] > 0 and resources[i] is not Resource.COMPUTE]
        computing = [i for i in heads if latency[i] > 0 and resources[i] is Resource.COMPUTE]
        moving = [i for i in heads if not latency[i] > 0 and body[i] > 0]
        over = [i for i in heads if not latency[i] > 0 and not body[i] > 0]
        if over:
            for i in over:
                ends[i] = now
                queues[graph.tasks[i].lane].remove(i)
            holders = {lane: holder for lane, holder in holders.items() if holder not in over}
            left = [needs.difference(over) if needs else needs for needs in left]
            continue
        rates = _rates(graph, costs, disturbances, waiting, computing, moving)
        work = {i: body[i] if i in moving else latency[i] for i in heads}
        seconds = min(work[i] / rates[i] for i in heads)
        for i in heads:
            rest = 0.0 if work[i] / rates[i] <= seconds * (1 + 1e-12) else work[i] - rates[i] * seconds
            if i in moving:
                body[i] = rest
            else:
                latency[i] = rest
        now += seconds
    return ends


def _open(graph: Graph, lane: Lane, queue: list[int], opened: set[int], left: list[set[int]], most: int) -> None:
    """Open requests of a lane for transfers: puts that may start, gets in their order."""
    if lane.resource not in LINKS:
        return
    room = most - len(opened.intersection(queue))
    for i in queue:
        if not room:
            return
        if i in opened or (lane.resource is Resource.UPLOAD and left[i]):
            continue
        if any(graph.tasks[need][1:3] == (lane.stage, lane.replica) for need in left[i]):
            return
        opened.add(i)
        room -= 1


def _at_work(
    graph: Graph,
    lane: Lane,
    queue: list[int],
    holders: dict[Lane, int],
    latency: list[float],
    left: list[set[int]],
    opened: set[int],
) -> list[int]:
    """The tasks of a lane that wait for their latency or have the lane, which one at a time can have."""
    ready = [i for i in queue if not left[i] and (i in opened or lane.resource not in LINKS)]
    askers = [i for i in ready if graph.tasks[i].kind in SIDE_BY_SIDE and latency[i] > 0]
    claims = [i for i in ready if i not in askers]
    if ORDERS[lane.resource] is Order.STRICT:
        claims = [i for i in claims if i == queue[0]]
    if lane not in holders and claims:
        holders[lane] = min(claims)
    return askers + ([holders[lane]] if lane in holders else [])


def _rates(
    graph: Graph, costs: Costs, disturbances: Disturbances, waiting: list[int], computing: list[int], moving: list[int]
) -> dict[int, float]:
    rates = dict.fromkeys(waiting, 1.0)
    for resource in LINKS:
        flows = [i for i in moving if graph.tasks[i].kind.resource is resource]
        capacity = disturbances.caps_bytes_s[0] or math.inf
        shares = fair_rates([float(costs.link_bytes_s[i]) for i in flows], capacity)
        rates |= dict(zip(flows, shares, strict=True))
    busy = {(graph.tasks[i].stage, graph.tasks[i].replica) for i in moving}
    cores = disturbances.shared_cores or math.inf
    processors = [1.0 if cores == math.inf else float(costs.processors[i]) for i in computing]
    for i, own, share in zip(computing, processors, fair_rates(processors, cores), strict=True):
        slowed = (graph.tasks[i].stage, graph.tasks[i].replica) in busy
        rates[i] = share / own / (disturbances.contention if slowed else 1.0)
    return rates
