"""Other policies, each a function from a problem to a plan, so that they can be set beside the best plan.

Uniform stages, and those after TPDMP and PipeDream, cut the model but do not choose everything together. They choose
among the settings that the exact search has, so none of their plans can be better than the best plan; nor can those of
Bayesian optimisation, which tries plans of the same space.

LambdaML, and HybridPS with a parameter server on a virtual machine, have no pipeline: both put the whole model into
every function, on the largest size, and take the fewest workers that fit. With gradient accumulation, which is 1F1B of
a single stage, a worker holds the activations of one micro-batch at a time instead of all of them.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import Estimate, Plan, Recompute, ScheduleKind, Sync
from funcpipe.core.distribution import install_command
from funcpipe.errors import Infeasible, InvalidValue, SolverUnavailable
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.evaluate import plan_loads
from funcpipe.partitioner.cost.formulas import lane_times, stage_costs
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.pipeline import dollars, plan_costs
from funcpipe.partitioner.cost.sync_ways import sync_times
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.options import edge_loads
from funcpipe.partitioner.problem.problem import Problem, StageChoice, report
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.search import best_for

Cuts = Sequence[tuple[int, int]]


def fitted(problem: Problem, setting: Setting, cuts: Cuts, sizes: Sequence[int]) -> Plan | None:
    """The plan with the stages `cuts` on `sizes`, given by number; None if one does not fit or is not admitted.

    A stage that does not fit otherwise recomputes, where the training allows it.
    """
    if len(cuts) * setting.replicas > problem.max_functions:
        return None
    placed = problem.placed
    for (first, stop), size in zip(cuts, sizes, strict=True):
        if not placed.admits(first, stop) or size not in placed.sizes_of(first, stop):
            return None
    plan = problem.plan(setting, [StageChoice(*cut, size, False) for cut, size in zip(cuts, sizes, strict=True)])
    full = [not _fits(plan, i) for i in range(len(cuts))]
    if any(full) and problem.training.recompute is Recompute.AUTO:
        plan = problem.plan(setting, [StageChoice(*c, s, f) for c, s, f in zip(cuts, sizes, full, strict=True)])
        full = [not _fits(plan, i) for i in range(len(cuts))]
    return None if any(full) else plan


def best_of(problem: Problem, plans: Iterable[Plan | None], *, policy: str) -> Plan:
    """The plan with the best objective; raises Infeasible if none of them keeps the limits."""
    kept = [(problem.goal.of_plan(plan), plan) for plan in plans if plan is not None]
    possible = [(objective, plan) for objective, plan in kept if objective < float("inf")]
    if not possible:
        raise Infeasible(f"the policy {policy} knows no plan that keeps all limits; the policy funcpipe may find one")
    return min(possible, key=lambda pair: pair[0])[1]


def _fits(plan: Plan, stage: int) -> bool:
    assert plan.estimate is not None
    return not plan.estimate.stages[stage].lacks_bytes(plan.stages[stage].memory_mb)


def uniform(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """Stages with equal numbers of layers, one size for all: the best such plan."""
    started_s = time.monotonic()
    layers = len(problem.profile.layers)
    plans = (
        fitted(problem, setting, _even(layers, count), [size] * count)
        for setting in problem.one_way_settings()
        for count in range(1, layers + 1)
        for size in sorted(problem.placed.open_sizes)
    )
    best = best_of(problem, plans, policy="uniform")
    return report(best, problem, name="uniform", bound=None, solve_s=time.monotonic() - started_s)


def tpdmp(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """After TPDMP: for each function size the fastest plan on that size alone; of these the best.

    The partition is chosen for throughput; only the size, the same for all stages, is chosen for the goal.
    """
    started_s = time.monotonic()
    fastest = Goal(counts_seconds=True, deadline_s=problem.goal.deadline_s)
    pinned = set(problem.placed.sizes.values())
    plans = (
        best_for(_on_one_size(problem, size), fastest) for size in sorted(problem.placed.open_sizes) if pinned <= {size}
    )
    best = best_of(problem, plans, policy="tpdmp")
    return report(best, problem, name="tpdmp", bound=None, solve_s=time.monotonic() - started_s)


def _on_one_size(problem: Problem, size: int) -> Problem:
    """The problem with all layers pinned to one size; the platform stays, so that the settings stay the same."""
    names = {layer.name: problem.spec.sizes[size].name for layer in problem.profile.layers}
    return replace(problem, pins=replace(problem.pins, sizes=names))


def pipedream(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """PipeDream's dynamic programme (Narayanan et al., SOSP 2019): the slowest stage is as fast as possible.

    For each setting, function size and number of stages it finds the cuts that minimise the time of the slowest stage:
    of its computation, its transfers or, spread over the micro-batches, its synchronisation. Of all these plans the
    best is taken.
    """
    started_s = time.monotonic()
    graph = problem.stage_graph
    plans = (
        fitted(problem, setting, cuts, [size] * len(cuts))
        for setting in problem.one_way_settings()
        for size, cuts in _balanced(problem, graph, setting)
    )
    best = best_of(problem, plans, policy="pipedream")
    return report(best, problem, name="pipedream", bound=None, solve_s=time.monotonic() - started_s)


def _even(layers: int, count: int) -> Cuts:
    """`count` stages with equal numbers of layers, give or take one."""
    return list(itertools.pairwise(round(layers * i / count) for i in range(count + 1)))


def _balanced(problem: Problem, graph: StageGraph, setting: Setting) -> Iterator[tuple[int, Cuts]]:
    """For each size and number of stages the cuts with the least time of the slowest stage."""
    loads = edge_loads(problem, graph)
    lanes = lane_times(loads, setting, workers=setting.replicas)
    sync_s = sync_times(loads, setting, workers=setting.replicas) / setting.micro_batches_each
    busy = [
        lanes.forward_s + lanes.backward_s,
        lanes.forward_upload_s + lanes.backward_upload_s,
        lanes.forward_download_s + lanes.backward_download_s,
        lanes.forward_to_host_s + lanes.backward_to_host_s,
        lanes.forward_to_device_s + lanes.backward_to_device_s,
        sync_s,
    ]
    slowest_s = np.max(np.stack([np.broadcast_to(some, busy[0].shape) for some in busy]), axis=0)
    most = min(graph.layers, problem.max_functions // setting.replicas)
    for size in sorted(problem.placed.open_sizes):
        for cuts in _least_peaks(graph, slowest_s[:, size], most):
            yield size, cuts


def _least_peaks(graph: StageGraph, peak: Array, most: int) -> Iterator[Cuts]:
    """For each number of stages up to `most` the path that minimises the greatest `peak`, where there is a path."""
    nodes = len(graph.position)
    least = np.full((most + 1, nodes), np.inf)
    least[0, graph.end] = 0.0
    choice = np.full((most + 1, nodes), -1)
    for stages in range(1, most + 1):
        reached = np.maximum(least[stages - 1, graph.after], peak)
        order = np.argsort(-reached, kind="stable")  # the least is written last
        least[stages, graph.before[order]] = reached[order]
        choice[stages, graph.before[order]] = order
        if np.isfinite(least[stages, graph.start]):
            yield _path(graph, choice, stages)


def _path(graph: StageGraph, choice: IntArray, stages: int) -> Cuts:
    node, cuts = graph.start, []
    for left in range(stages, 0, -1):
        edge = int(choice[left, node])
        cuts.append((int(graph.first[edge]), int(graph.stop[edge])))
        node = int(graph.after[edge])
    return cuts


TRIALS = 200
_MOST_STAGES = 12


def bayes(problem: Problem, *, time_limit_s: float | None = None, trials: int = TRIALS, seed: int = 0) -> Plan:
    """The best plan of `trials` that a tree-structured Parzen estimator (Optuna's default) suggests one by one.

    It chooses the setting, the number of stages, their cuts and their sizes; stages recompute where they must. Raises
    SolverUnavailable without Optuna, Infeasible if no trial keeps the limits.
    """
    try:
        import optuna
    except ImportError as error:
        raise SolverUnavailable(f"the policy bayes needs Optuna; run: {install_command('bayesian')}") from error
    started_s = time.monotonic()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
    settings, layers = problem.one_way_settings(), len(problem.profile.layers)
    sizes = sorted(problem.placed.open_sizes)
    seen: list[Plan | None] = []

    def price(trial: "optuna.Trial") -> float:
        setting = settings[trial.suggest_int("setting", 0, len(settings) - 1)]
        count = trial.suggest_int("stages", 1, min(layers, _MOST_STAGES))
        inner = {trial.suggest_int(f"cut{i}", 1, layers - 1) for i in range(count - 1)}
        cuts = list(itertools.pairwise((0, *sorted(inner), layers)))
        chosen = [sizes[trial.suggest_int(f"size{i}", 0, len(sizes) - 1)] for i in range(len(cuts))]
        plan = fitted(problem, setting, cuts, chosen)
        seen.append(plan)
        worst = 1e9
        return worst if plan is None else min(problem.goal.of_plan(plan), worst)

    study.optimize(price, n_trials=trials, timeout=time_limit_s)
    best = best_of(problem, seen, policy="bayes")
    return report(best, problem, name="bayes", bound=None, solve_s=time.monotonic() - started_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A virtual machine that keeps the parameters: its link each way and its price.

    The default is an AWS c5.9xlarge: 10 Gbit/s (aws.amazon.com/ec2/instance-types/c5) and 1.53 $/h on demand in
    us-east-1 (aws.amazon.com/ec2/pricing/on-demand), as of 2024.
    """

    bytes_s: float = 1.25e9
    price_usd_s: float = 1.53 / 3600


def lambdaml(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """LambdaML (Jiang et al., SIGMOD 2021): scatter-reduce in three phases."""
    return _data_parallel(problem, "lambdaml", ScheduleKind.GPIPE)


def lambdaml_ga(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """LambdaML with gradient accumulation."""
    return _data_parallel(problem, "lambdaml-ga", ScheduleKind.ONE_F_ONE_B)


def hybridps(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """Functions around a parameter server (Cirrus, SoCC 2019); the estimate includes its synchronisation and price."""
    return _data_parallel(problem, "hybridps", ScheduleKind.GPIPE, server=Server())


def hybridps_ga(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """`hybridps` with gradient accumulation."""
    return _data_parallel(problem, "hybridps-ga", ScheduleKind.ONE_F_ONE_B, server=Server())


def _data_parallel(problem: Problem, policy: str, schedule: ScheduleKind, *, server: Server | None = None) -> Plan:
    started_s = time.monotonic()
    if server is not None and problem.training.shard_optimizer:
        raise InvalidValue("shard_optimizer", True, f"does not go with the policy {policy}: its server updates")
    if server is not None and problem.training.trains_locally:
        rule = f"must be 1 with the policy {policy}: its server sums in every step"
        raise InvalidValue("sync_every", problem.training.sync_every, rule)
    if problem.training.joint_loss and (server is not None or schedule is not ScheduleKind.GPIPE):
        rule = f"does not go with the policy {policy}, where no replica sees the outputs of all micro-batches"
        raise InvalidValue("joint_loss", True, rule)
    size = max(problem.placed.open_sizes, key=lambda number: problem.spec.sizes[number].memory_mb)
    for degree in problem.degrees:
        setting = problem.setting(degree, Sync.THREE_PHASE, schedule)
        plan = problem.plan(setting, [StageChoice(0, len(problem.profile.layers), size, False)])
        estimate = plan.estimate
        assert estimate is not None
        if not _fits(plan, 0):
            continue
        if server is not None and degree > 1:
            estimate = _with_server(plan, problem, setting, server)
        priced = replace(plan, estimate=estimate)
        if problem.goal.of_plan(priced) == float("inf"):
            raise Infeasible(
                f"the policy {policy} takes {degree} workers, {estimate.iteration_s:.4g} s and "
                f"{estimate.cost_usd:.4g} $ for an iteration, which breaks a limit; it knows no other plan"
            )
        return report(priced, problem, name=policy, bound=None, solve_s=time.monotonic() - started_s)
    raise Infeasible(
        f"the policy {policy} needs a function that holds the whole model; none of {problem.spec.name} does"
    )


def _with_server(plan: Plan, problem: Problem, setting: Setting, server: Server) -> Estimate:
    """The estimate of a plan of one stage that synchronises through a server instead of storage."""
    assert plan.estimate is not None
    spec, loads = problem.spec, plan_loads(plan, problem.profile, problem.spec)
    sync_s = _parameter_server_s(
        loads.parameter_bytes.item(),
        setting.replicas,
        loads.upload_bytes_s.item(),
        loads.download_bytes_s.item(),
        spec.latency_s,
        server.bytes_s,
    )
    lanes = lane_times(loads, setting, workers=plan.workers)
    stage = stage_costs(loads, lanes, np.array([sync_s]), setting)
    whole = plan_costs(stage._replace(share=setting.round_shares(1)), setting)
    iteration_s = whole.iteration_s.item()
    compute_usd = dollars(whole.price_usd_s.item() + server.price_usd_s, iteration_s, 0.0)
    return replace(
        plan.estimate,
        iteration_s=iteration_s,
        cost_usd=compute_usd,
        compute_usd=compute_usd,
        request_usd=0.0,
        puts=0,
        gets=0,
        bottleneck=f"stage 0 {'synchronisation' if sync_s > iteration_s - sync_s else 'compute'}",
        stages=(replace(plan.estimate.stages[0], sync_s=sync_s),),
    )


def _parameter_server_s(
    gradient_bytes: float, replicas: int, up: float, down: float, latency_s: float, server_bytes_s: float
) -> float:
    """Seconds in which all replicas push gradients to a server and pull parameters from it.

    The server moves `server_bytes_s` each way, for all of them together, and no storage lies between: one latency each
    way (HybridPS in LambdaML; Cirrus, SoCC 2019).
    """
    all_bytes = replicas * gradient_bytes
    push_s = max(gradient_bytes / up, all_bytes / server_bytes_s)
    return push_s + max(gradient_bytes / down, all_bytes / server_bytes_s) + 2 * latency_s
