"""Random markets of functions, spot machines and clusters, with deadlines that are tight, loose or impossible."""

import math
import random
from dataclasses import replace

from funcpipe.core.loss_model import InverseLoss, WeightedLoss
from funcpipe.core.provision import JobSpec
from funcpipe.neighbours.provisioning import cynthia
from funcpipe.neighbours.provisioning.cynthia import ClusterWorkload, Mode, ServerType, WorkerType
from funcpipe.neighbours.provisioning.goal import Goal
from funcpipe.neighbours.provisioning.lambdadnn import FunctionMarket, FunctionWorkload, predict
from funcpipe.neighbours.provisioning.spotdnn import Space, SpotSystem, SpotType
from tests.neighbours.provisioning.published import LAMBDA

SERVER = ServerType(name="server", vcpu=4, network_mb_s=1000, usd_h=0.2, quota=4)
WORK = ClusterWorkload(iteration_vcpu_s=50, model_mb=100)
KIND = WorkerType(name="worker", rate_vcpu=8, network_mb_s=1000, usd_h=0.4, quota=30)
LOSS = InverseLoss(scale=1000, floor=0.3, batch=128)


def cluster_goal(deadline_s: float = math.inf, target: float = 0.8) -> Goal:
    job = JobSpec(samples=50_000, global_batch=128, target_loss=target)
    return Goal(job=job, loss=LOSS, deadline_s=deadline_s)


def random_functions(draw: random.Random) -> tuple[float, float, FunctionWorkload, FunctionMarket]:
    work = FunctionWorkload(
        dataset_mb=draw.uniform(10, 5000),
        model_mb=draw.uniform(1, 400),
        local_batch=draw.choice([16, 64, 256]),
        global_batch=draw.choice([256, 1024]),
        rate_slope=draw.uniform(0.001, 0.1),
        rate_base=draw.uniform(-1, 10),
        memory_min_mb=draw.choice([1024, 1728]),
        store_slope=0.002228,
        store_base=16.12,
        store_flat_mb=1792,
    )
    market = replace(LAMBDA, max_functions=40, function_mb_s=draw.choice([40.0, 84.0, 300.0]))
    samples = draw.uniform(1e4, 1e6)
    quickest = min(predict(n, 3008, samples, work, market).seconds for n in range(1, 41))
    return samples, quickest * draw.uniform(0.9, 3), work, market


def random_market(draw: random.Random) -> tuple[tuple[SpotType, ...], SpotSystem, Goal]:
    system = SpotSystem(
        model_mb=draw.uniform(5, 600),
        request_mb_s=draw.uniform(100, 600),
        server_mb_s=1200,
        contention_slope=draw.uniform(0.4, 1.2),
        contention_base=draw.uniform(-2.5, 0.3),
    )
    types = tuple(
        SpotType(
            name=f"m{i}",
            batch=2 ** draw.randint(7, 11),
            compute_s=draw.uniform(0.1, 3),
            gpus=draw.choice([1, 2, 4, 8]),
            usd_h=draw.uniform(0.3, 3),
            quota=draw.randint(1, 5),
        )
        for i in range(draw.randint(2, 5))
    )
    loss = WeightedLoss(
        gamma1=draw.uniform(0, 300),
        gamma2=-draw.uniform(0.01, 0.3),
        gamma3=draw.uniform(1500, 4000),
        gamma4=draw.uniform(0.2, 1),
        gamma5=0.5,
        heterogeneity=draw.random() < 0.5,
    )
    job = JobSpec(samples=50_000, global_batch=1024, target_loss=draw.uniform(0.6, 1.2))
    open_ended = Space(types, system, Goal(job=job, loss=loss))
    quickest = min(one.seconds for counts in open_ended.all_counts() if (one := open_ended.predicted(counts)))
    return (
        types,
        system,
        Goal(job=job, loss=loss, deadline_s=quickest * draw.choice([0.99, 1.001, 1.02, draw.uniform(1, 3)])),
    )


def random_clusters(
    draw: random.Random,
) -> tuple[list[WorkerType], ClusterWorkload, ServerType, Mode, Goal]:
    types = [
        WorkerType(
            name=f"m{i}",
            rate_vcpu=draw.uniform(1, 100),
            network_mb_s=draw.uniform(100, 2000),
            usd_h=draw.uniform(0.1, 5),
            quota=draw.randint(1, 12),
        )
        for i in range(draw.randint(1, 5))
    ]
    work = ClusterWorkload(iteration_vcpu_s=draw.uniform(5, 500), model_mb=draw.uniform(1, 500))
    server, mode = replace(SERVER, quota=draw.randint(1, 3)), draw.choice(list(Mode))
    every = cynthia.enumerated(types, work=work, server=server, mode=mode, goal=cluster_goal())
    quickest = min(one.seconds for one in every)
    return types, work, server, mode, cluster_goal(quickest * draw.choice([0.99, 1.001, draw.uniform(1, 3)]))
