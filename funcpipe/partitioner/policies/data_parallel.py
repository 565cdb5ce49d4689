"""Data parallelism without a pipeline: LambdaML, and HybridPS with a parameter server on a virtual machine.

Both put the whole model into every function and take the largest function and the fewest workers that fit. With
gradient accumulation, which is 1F1B of a single stage, a worker holds the activations of one micro-batch at a time
instead of all of them.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import Estimate, Plan, ScheduleKind, Sync
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.cost.formulas import Setting
from funcpipe.partitioner.problem.problem import Choice, Problem, report


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
    """Functions around a parameter server (Cirrus, SoCC 2019). The estimate holds its synchronisation and its price."""
    return _data_parallel(problem, "hybridps", ScheduleKind.GPIPE, server=Server())


def hybridps_ga(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """`hybridps` with gradient accumulation."""
    return _data_parallel(problem, "hybridps-ga", ScheduleKind.ONE_F_ONE_B, server=Server())


def _data_parallel(problem: Problem, policy: str, schedule: ScheduleKind, *, server: Server | None = None) -> Plan:
    started_s = time.monotonic()
    if server is not None and problem.training.shard_optimizer:
        raise InvalidValue("shard_optimizer", True, f"does not go with the policy {policy}: its server updates")
    size = max(problem.placed.open_sizes, key=lambda number: problem.spec.sizes[number].memory_mb)
    for degree in problem.degrees:
        setting = problem.setting(degree, Sync.THREE_PHASE, schedule)
        plan = problem.plan(setting, [Choice(0, len(problem.profile.layers), size, False)])
        estimate = evaluate(plan, problem.profile, problem.spec)
        if estimate.peak_memory_bytes > problem.spec.sizes[size].memory_bytes:
            continue
        if server is not None and degree > 1:
            estimate = _with_server(estimate, problem, setting, size, server)
        priced = replace(plan, estimate=estimate)
        if problem.goal.of_plan(priced) == float("inf"):
            raise Infeasible(
                f"the policy {policy} takes {degree} workers, {estimate.iteration_s:.4g} s and "
                f"{estimate.cost_usd:.4g} $ for an iteration, which breaks a limit; it knows no other plan"
            )
        return report(priced, problem.goal, name=policy, bound=None, solve_s=time.monotonic() - started_s)
    raise Infeasible(
        f"the policy {policy} needs a function that holds the whole model; none of {problem.spec.name} does"
    )


def _with_server(estimate: Estimate, problem: Problem, setting: Setting, size: int, server: Server) -> Estimate:
    """The estimate of one stage that pushes its gradient to a server and pulls the parameters, instead of storage.

    Each way takes as long as the slower of the worker's link and the server's, which serves all workers.
    """
    function = problem.spec.sizes[size]
    gradient_bytes = sum(layer.parameter_bytes for layer in problem.profile.layers)
    at_server_s = setting.replicas * gradient_bytes / server.bytes_s
    push_s = max(gradient_bytes / function.upload_bytes_s, at_server_s)
    pull_s = max(gradient_bytes / function.download_bytes_s, at_server_s)
    sync_s = push_s + pull_s + 2 * problem.spec.latency_s
    iteration_s = estimate.iteration_s - estimate.stages[0].sync_s + sync_s
    if problem.spec.shared_cores is not None:
        iteration_s = max(iteration_s, estimate.iteration_s)
    compute_usd = (setting.replicas * function.price_usd_s + server.price_usd_s) * iteration_s
    busy_s = np.array([iteration_s - sync_s, sync_s])
    return replace(
        estimate,
        iteration_s=iteration_s,
        cost_usd=compute_usd,
        compute_usd=compute_usd,
        request_usd=0.0,
        puts=0,
        gets=0,
        bottleneck=f"stage 0 {('compute', 'synchronisation')[int(busy_s.argmax())]}",
        stages=(replace(estimate.stages[0], sync_s=sync_s),),
    )
