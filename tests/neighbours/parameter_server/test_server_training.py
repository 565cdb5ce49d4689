"""What a parameter server's run is made of, and the new plans of its spot machines."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from funcpipe import FuncPipe, ServerCluster, ServerFunctions, ServerWorker
from funcpipe.core.provision import CostItem, JobSpec, Provision, Rented
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.neighbours.parameter_server.loops import History, LoopConfig, train_asynchronously
from funcpipe.neighbours.parameter_server.on_functions import expected
from funcpipe.neighbours.parameter_server.on_machines import Replanner, SpotPlan, cluster_of
from funcpipe.neighbours.parameter_server.training import check_servable
from funcpipe.neighbours.parameter_server.worker_group import Updates
from funcpipe.neighbours.provisioning.goal import Goal
from funcpipe.neighbours.provisioning.spotdnn import SpotSystem, SpotType
from funcpipe.platforms.catalog import load_market
from funcpipe.training.averaging import EMA
from tests.neighbours.parameter_server.conftest import RUN, adam_recipe, make_job, stored_adam
from tests.support.server_group import InTurnWorkerGroup

MARKET = load_market("aws")
FAST, SLOW = "m5.2xlarge", "m5.large"


def way(*rented: Rented) -> Provision:
    cost = (CostItem(name="all", usd=1.0),)
    return Provision(way="w", rented=rented, seconds=1.0, iterations=1.0, cost=cost, binds="price", why="")


def test_a_provision_becomes_workers_with_the_speeds_of_their_machines() -> None:
    names = [machine.name for machine in MARKET.machines if machine.gpu is None][:2]
    first, second = (MARKET.machine(name) for name in names)
    rented = (Rented(name=first.name, count=2, spot=True), Rented(name=second.name, count=1))
    server = Rented(name=MARKET.server, count=1, role="parameter server")
    cluster = cluster_of(way(*rented, server), MARKET)
    assert isinstance(cluster, ServerCluster)
    assert [worker.machine for worker in cluster.workers] == [first.name, first.name, second.name]
    ratio = cluster.workers[0].speed / cluster.workers[2].speed
    assert ratio == pytest.approx(first.vcpu / second.vcpu)
    assert min(worker.speed for worker in cluster.workers) == 1.0
    assert [worker.spot for worker in cluster.workers] == [True, True, False]
    assert cluster.server == MARKET.server
    assert not cluster.workers[0].resources
    placed = cluster_of(way(*rented, server), MARKET, platform="ray://host:1")
    assert isinstance(placed, ServerCluster)
    assert placed.workers[0].resources == {first.name: 1.0}


def test_a_provision_of_functions_becomes_functions() -> None:
    server = Rented(name=MARKET.server, count=1, role="parameter server")
    rented = Rented(name="2048MB aws-lambda", count=4)
    found = cluster_of(way(rented, server), MARKET, like="aws-lambda")
    assert found == ServerFunctions(workers=4, memory_mb=2048, server=MARKET.server, like="aws-lambda")
    assert [worker.name for worker in found.server_workers] == ["f0", "f1", "f2", "f3"]
    deployed = cluster_of(way(rented, server), MARKET, platform="aws-lambda://mine")
    assert isinstance(deployed, ServerFunctions)
    assert deployed.platform == "aws-lambda://mine"


def test_a_prediction_is_scaled_to_the_steps_that_are_trained() -> None:
    predicted = replace(way(Rented(name="2048MB aws-lambda", count=4)), start_s=20.0, seconds=120.0, iterations=50.0)
    assert expected(predicted, 50) == (120.0, 1.0)
    assert expected(predicted, 100) == pytest.approx((220.0, 220 / 120))


def test_ways_without_a_server_or_with_unknown_machines_are_refused() -> None:
    with pytest.raises(PlanError, match="has no parameter server"):
        cluster_of(way(Rented(name=MARKET.machines[0].name, count=1)), MARKET)
    server = Rented(name=MARKET.server, count=1, role="parameter server")
    with pytest.raises(PlanError, match=f"nowhere.4x, which w rents, is no machine of the market {MARKET.name}"):
        cluster_of(way(Rented(name="nowhere.4x", count=4), server), MARKET)
    with pytest.raises(InvalidValue, match="like is for functions, and w trains on machines"):
        cluster_of(way(Rented(name=SLOW, count=4), server), MARKET, like="aws-lambda")
    with pytest.raises(InvalidValue, match="one worker at least"):
        cluster_of(way(server), MARKET)


def test_clusters_without_workers_or_with_one_name_twice_are_refused() -> None:
    with pytest.raises(InvalidValue, match="one worker at least"):
        ServerCluster(workers=())
    with pytest.raises(InvalidValue, match="names of their own"):
        ServerCluster(workers=(ServerWorker(name="a"), ServerWorker(name="a")))


def test_a_ray_cluster_needs_a_storage() -> None:
    pipe = FuncPipe(nn.Linear(2, 2), loss_fn=nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.SGD))
    cluster = ServerCluster(workers=(ServerWorker(name="a"),), platform="ray://host:6379")
    data = [(torch.zeros(2), torch.tensor(0))] * 4
    with pytest.raises(InvalidValue, match="must be given with a Ray cluster"):
        pipe.train_with_server(data, way=cluster, global_batch=2, micro_batch=1)


def test_what_a_server_cannot_train_is_refused() -> None:
    recipe = adam_recipe()
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(PlanError, match="does not validate"):
        check_servable(make_job(replace(recipe, scheduler=plateau)), Updates.BSP)
    averaged = make_job(replace(recipe, average=EMA(decay=0.9)))
    check_servable(averaged, Updates.BSP)
    with pytest.raises(PlanError, match="depends on their order"):
        check_servable(averaged, Updates.ASP)


TYPES = (
    SpotType(name="small", batch=2, compute_s=2.0, gpus=0, usd_h=0.1, quota=4),
    SpotType(name="large", batch=2, compute_s=1.0, gpus=0, usd_h=0.3, quota=4),
)
SYSTEM = SpotSystem(model_mb=0.001, request_mb_s=100.0, server_mb_s=1000.0)


def spot_plan(deadline_s: float) -> SpotPlan:
    job = JobSpec(samples=22, global_batch=8, epochs=2, deadline_s=deadline_s)
    return SpotPlan(goal=Goal(job=job, deadline_s=deadline_s), types=TYPES, system=SYSTEM, overhead_s=1.0)


def worker(kind: SpotType, name: str) -> ServerWorker:
    return ServerWorker(name=name, machine=kind.name, speed=kind.batch / kind.compute_s, spot=True)


@pytest.mark.parametrize(("deadline_s", "joins"), [(25.0, True), (1e6, False), (1.5, False)])
def test_a_notice_lets_workers_leave_and_adds_what_is_missing(deadline_s: float, joins: bool) -> None:
    """44 samples: two small machines take 22 s. One is taken back halfway, and the other alone would take 22 s more."""
    job, sent, storage = stored_adam()
    notices: list[str] = []
    rented: list[str] = []
    group = InTurnWorkerGroup(
        sent,
        storage,
        RUN,
        [worker(TYPES[0], "s0"), worker(TYPES[0], "s1")],
        before_push=lambda group, name, pushed: notices.append("s1") if pushed == 10 else None,
    )
    replanner = Replanner(
        spot_plan(deadline_s),
        lambda: notices,
        lambda workers: rented.extend(worker.name for worker in workers),
        like=worker,
        clock=lambda: group.now_s,
    )
    history = History()
    train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, watch=replanner), history)
    (seen,) = replanner.revocations
    assert seen.left == ("s1",)
    assert seen.joined == tuple(rented)
    assert bool(rented) == joins
    assert all(name.startswith("large") for name in rented), "small ones are to be had no more"
    assert (seen.plan is None) == (deadline_s < 2)
    assert sum(push.samples for push in history.pushes) == 44
    if joins:
        assert group.now_s <= deadline_s
        assert seen.plan is not None
        assert seen.plan.seconds + seen.time_s <= deadline_s


def test_a_worker_that_vanishes_without_notice_is_replaced_too() -> None:
    job, sent, storage = stored_adam()
    group = InTurnWorkerGroup(
        sent,
        storage,
        RUN,
        [worker(TYPES[0], "s0"), worker(TYPES[0], "s1")],
        before_push=lambda group, name, pushed: group.kill("s1") if pushed == 10 else None,
    )
    replanner = Replanner(spot_plan(25.0), list, lambda workers: None, like=worker, clock=lambda: group.now_s)
    history = History()
    train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, watch=replanner), history)
    assert [one.left for one in replanner.revocations] == [("s1",)]
    assert replanner.revocations[0].joined
    assert sum(push.samples for push in history.pushes) == 44
    assert group.now_s <= 25.0
