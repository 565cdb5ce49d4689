"""Cynthia-style provisioning: one type of machine and parameter servers, after Zheng et al., ICPP 2019.

The paper's text was not available: the formulas here are a reconstruction that fits its abstract, not quotations, and
their numbers count nothing but their order here. Established are its aim (parameter-server training on machines, a
target time at the least cost) and what it models: the use of processors and network by workers and servers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from funcpipe.core import checks
from funcpipe.core.provision import SERVER_ROLE, CostItem, Provision, Rented
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.goal import Cluster, Goal, no_way, provision, what_binds

ASSUMPTION = "Cynthia-style: the paper's text was not available, so the formulas are a reconstruction"


class Mode(Enum):
    """The way workers take part in an update: all together (BSP), or each for itself (ASP)."""

    BSP = "bsp"
    ASP = "asp"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerType:
    """A type of machine: its rate in vCPU, its network, its price, how many there are.

    In each iteration its GPUs exchange gradients among themselves for `exchange_s`; that term is ours.
    """

    name: str
    rate_vcpu: float
    network_mb_s: float
    usd_h: float
    quota: int
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerType:
    """The machine of a parameter server: processors and network that it supplies, and what a MB costs of the former."""

    name: str
    vcpu: float
    network_mb_s: float
    usd_h: float
    quota: int
    vcpu_s_mb: float = 0.001

    def __post_init__(self) -> None:
        for name in ("vcpu", "network_mb_s", "usd_h"):
            checks.positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorkload:
    """One iteration of the global batch: vCPU-seconds of computation, and the model that is pulled and pushed."""

    iteration_vcpu_s: float
    model_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPrediction:
    """The predicted time and cost of `workers` machines of `kind` and `servers` servers."""

    kind: WorkerType
    workers: int
    servers: int
    seconds: float
    usd: float
    iterations: float
    utilisation: float


def predict(
    kind: WorkerType, workers: int, servers: int, *, work: ClusterWorkload, server: ServerType, mode: Mode, goal: Goal,
    start_s: float = 0.0,
) -> ClusterPrediction:  # fmt: skip
    """Time and cost of a cluster of one type."""
    use = utilisation(kind, workers, servers, work=work, server=server)
    if mode is Mode.BSP:
        iterations = goal.synchronous_samples() / goal.job.global_batch
        compute_s = work.iteration_vcpu_s / (workers * use * kind.rate_vcpu) + kind.exchange_s
        seconds = iterations * max(compute_s, communication_s(kind, workers, servers, work=work, server=server))
    else:
        batch = goal.job.global_batch
        iterations = goal.asynchronous_steps(Cluster(batch=batch, workers=workers, convergence=0.0))
        each_s = work.iteration_vcpu_s / (use * kind.rate_vcpu) + kind.exchange_s
        each_s += communication_s(kind, 1, servers, work=work, server=server)
        seconds = iterations * each_s / workers
    seconds += start_s
    usd = seconds / 3600 * (workers * kind.usd_h + servers * server.usd_h)
    return ClusterPrediction(
        kind=kind, workers=workers, servers=servers, seconds=seconds, usd=usd, iterations=iterations, utilisation=use
    )


def communication_s(
    kind: WorkerType, workers: int, servers: int, *, work: ClusterWorkload, server: ServerType
) -> float:
    """Pull and push of all workers through the servers' network, or of one through its own if that is slower."""
    moved_mb = 2 * work.model_mb
    return max(workers * moved_mb / (servers * server.network_mb_s), moved_mb / kind.network_mb_s)


def demand(kind: WorkerType, *, work: ClusterWorkload, server: ServerType) -> tuple[float, float]:
    """The demand on servers of one worker that computes all the time: MB a second, and vCPU."""
    alone_s = work.iteration_vcpu_s / kind.rate_vcpu
    asked_mb_s = 2 * work.model_mb / alone_s
    return asked_mb_s, asked_mb_s * server.vcpu_s_mb


def utilisation(kind: WorkerType, workers: int, servers: int, *, work: ClusterWorkload, server: ServerType) -> float:
    """The share of the time that workers compute: supply over demand of network and processors, at most 1."""
    asked_mb_s, asked_vcpu = demand(kind, work=work, server=server)
    network = servers * server.network_mb_s / (workers * asked_mb_s)
    processors = servers * server.vcpu / (workers * asked_vcpu) if asked_vcpu else math.inf
    return min(1.0, network, processors)


def fed_workers(kind: WorkerType, *, work: ClusterWorkload, server: ServerType) -> float:
    """The workers that one server feeds before its processors or its network are saturated."""
    asked_mb_s, asked_vcpu = demand(kind, work=work, server=server)
    return min(server.network_mb_s / asked_mb_s, server.vcpu / asked_vcpu if asked_vcpu else math.inf)


def fewest_workers(kind: WorkerType, *, work: ClusterWorkload, mode: Mode, goal: Goal, start_s: float = 0.0) -> int:
    """A lower bound: so many workers make the deadline if communication takes no time."""
    if math.isinf(goal.deadline_s):
        return 1
    batch = goal.job.global_batch
    alone = goal.asynchronous_steps(Cluster(batch=batch, workers=1, convergence=0.0))
    iterations = goal.synchronous_samples() / batch if mode is Mode.BSP else alone
    needed = iterations * work.iteration_vcpu_s / (kind.rate_vcpu * max(goal.deadline_s - start_s, 1e-9))
    slowed = mode is Mode.ASP and goal.job.target_loss is not None  # iterations grow with the root of the workers
    return max(1, math.ceil((needed**2 if slowed else needed) - 1e-9))


def candidates(
    kind: WorkerType, *, work: ClusterWorkload, server: ServerType, mode: Mode, goal: Goal, start_s: float
) -> Iterator[tuple[int, int]]:
    """Workers and servers between both bounds, fewest workers first: as many servers as feed the fewest workers."""
    feeds = fed_workers(kind, work=work, server=server)
    lower = fewest_workers(kind, work=work, mode=mode, goal=goal, start_s=start_s)
    servers = max(1, math.ceil(lower / feeds))
    upper = max(lower, math.floor(feeds * servers))
    if mode is Mode.BSP:  # beyond this, exchanging takes longer than computing
        balance = work.iteration_vcpu_s * servers * server.network_mb_s / (2 * work.model_mb * kind.rate_vcpu)
        upper = min(upper, max(lower, math.floor(math.sqrt(balance))))
    if servers <= server.quota:
        yield from ((workers, servers) for workers in range(lower, min(upper, kind.quota) + 1))


def search(
    types: Sequence[WorkerType], *, work: ClusterWorkload, server: ServerType, mode: Mode, goal: Goal,
    start_s: float = 0.0,
) -> ClusterPrediction | None:  # fmt: skip
    """The best of the first numbers of workers of each type that meet the deadline."""
    best: ClusterPrediction | None = None
    for kind in types:
        for workers, servers in candidates(kind, work=work, server=server, mode=mode, goal=goal, start_s=start_s):
            found = predict(kind, workers, servers, work=work, server=server, mode=mode, goal=goal, start_s=start_s)
            if found.seconds <= goal.deadline_s and (best is None or found.usd < best.usd):
                best = found
                break
    return best


def enumerated(
    types: Sequence[WorkerType], *, work: ClusterWorkload, server: ServerType, mode: Mode, goal: Goal,
    start_s: float = 0.0,
) -> Iterator[ClusterPrediction]:  # fmt: skip
    """All clusters of one type: the oracle, and the way out of `search`."""
    for kind in types:
        for workers in range(1, kind.quota + 1):
            for servers in range(1, server.quota + 1):
                yield predict(kind, workers, servers, work=work, server=server, mode=mode, goal=goal, start_s=start_s)


def cynthia(
    goal: Goal,
    types: Sequence[WorkerType],
    *,
    work: ClusterWorkload,
    server: ServerType,
    mode: Mode,
    start_s: float = 0.0,
) -> Provision:
    """A Cynthia-style choice; where its search between bounds finds nothing, all clusters of one type are tried."""
    goal.check()
    found, why = _chosen(goal, types, work=work, server=server, mode=mode, start_s=start_s)
    hours = found.seconds / 3600
    cluster = Cluster(batch=goal.job.global_batch, workers=found.workers, convergence=0.0)
    return provision(
        f"cynthia-{mode.value}",
        goal,
        rented=[
            Rented(name=found.kind.name, count=found.workers),
            Rented(name=server.name, count=found.servers, role=SERVER_ROLE),
        ],
        seconds=found.seconds,
        start_s=start_s,
        iterations=found.iterations,
        cost=[
            CostItem(name=found.kind.name, usd=hours * found.workers * found.kind.usd_h),
            CostItem(name="server", usd=hours * found.servers * server.usd_h),
        ],
        binds="the server" if found.utilisation < 1 else what_binds(found.seconds, goal.deadline_s),
        why=why,
        cluster=None if mode is Mode.BSP else cluster,
        assumptions=[ASSUMPTION],
    )


def _chosen(
    goal: Goal, types: Sequence[WorkerType], *, work: ClusterWorkload, server: ServerType, mode: Mode, start_s: float
) -> tuple[ClusterPrediction, str]:
    """The result of the search, or else the cheapest of all clusters of one type; and which of the two, in words."""
    found = search(types, work=work, server=server, mode=mode, goal=goal, start_s=start_s)
    if found is not None:
        return found, "the first number of workers that makes it, of the cheapest type"
    every = list(enumerated(types, work=work, server=server, mode=mode, goal=goal, start_s=start_s))
    if not every:
        raise Infeasible("cynthia: no machine of the market has the memory for the model; add a larger one")
    made = [one for one in every if one.seconds <= goal.deadline_s]
    if not made:
        quickest = min(one.seconds for one in every)
        raise no_way(f"cynthia-{mode.value}", goal, quickest, "clusters of one type")
    return min(made, key=lambda one: one.usd), "the bounds leave none, so all clusters of one type were tried"
