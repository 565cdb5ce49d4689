"""Data parallelism without a pipeline: LambdaML, and HybridPS with a parameter server on a virtual machine.

Both put the whole model into every function, on the largest size, and take the fewest workers that fit. With gradient
accumulation, which is 1F1B of a single stage, a worker holds the activations of one micro-batch at a time instead of
all of them.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import Estimate, Plan, ScheduleKind, Sync
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.cost.evaluate import plan_loads
from funcpipe.partitioner.cost.formulas import lane_times, stage_costs
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.pipeline import dollars, plan_costs
from funcpipe.partitioner.cost.sync_time import parameter_server_s
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.report import report


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
    if problem.training.joint_loss and (server is not None or schedule is not ScheduleKind.GPIPE):
        rule = f"does not go with the policy {policy}, where no replica sees the outputs of all micro-batches"
        raise InvalidValue("joint_loss", True, rule)
    size = max(problem.placed.open_sizes, key=lambda number: problem.spec.sizes[number].memory_mb)
    for degree in problem.degrees:
        setting = problem.setting(degree, Sync.THREE_PHASE, schedule)
        plan = problem.plan(setting, [StageChoice(0, len(problem.profile.layers), size, False)])
        estimate = plan.estimate
        assert estimate is not None
        if estimate.peak_memory_bytes > problem.spec.sizes[size].memory_bytes:
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
    sync_s = parameter_server_s(
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
