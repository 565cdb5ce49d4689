"""Training around a parameter server from beginning to end: what it is run on, the run, the bill."""

import functools
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from funcpipe.client.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.prepare import new_run_name
from funcpipe.client.server_job import check_servable, one_stage, stored_job
from funcpipe.core import RunSettings
from funcpipe.core.market import HOUR_S, Market
from funcpipe.core.provision import SERVER_ROLE, CostItem, Provision
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.parameter_server.loops import (
    Course,
    History,
    Watch,
    nothing_changes,
    train_asynchronously,
    train_synchronously,
)
from funcpipe.parameter_server.values import PushRecord, ServerWorker, Updates
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.ray.address import RayAddress, Via, parse_address
from funcpipe.training.data_source import Data

if TYPE_CHECKING:
    from funcpipe.parameter_server.ray_crew import RayCrew

RAY_HERE = "ray://local"
_OBJECT_STORE_BYTES = 256 << 20  # of a Ray that is started here: parameters and gradients pass through it


@dataclass(frozen=True, kw_only=True)
class ServerCluster:
    """Where to train around a parameter server: `workers`, and the machine `server` of the market.

    `platform` is the URL of a Ray cluster; `ray://local` starts one on this machine, with a processor for each worker.
    `server_resources` are what Ray must have free on the server's node, `server_link_bytes_s` imposes its bandwidth.
    """

    workers: tuple[ServerWorker, ...]
    server: str = ""
    platform: str = RAY_HERE
    server_resources: Mapping[str, float] = field(default_factory=dict)
    server_link_bytes_s: float | None = None

    def __post_init__(self) -> None:
        names = [worker.name for worker in self.workers]
        if not names:
            raise InvalidValue("workers", self.workers, "must hold one worker at least")
        if len(set(names)) < len(names):
            raise InvalidValue("workers", names, "must have names of their own")

    @property
    def address(self) -> RayAddress:
        """The cluster that `platform` names. Raises InvalidValue."""
        address = parse_address(self.platform)
        return replace(address, cpus=address.cpus or len(self.workers)) if address.via is Via.LOCAL else address


def cluster_of(way: Provision, market: Market, *, platform: str = RAY_HERE) -> ServerCluster:
    """The cluster that a provision rents, with the speeds that the market says its machines have.

    In a Ray cluster each node must have a resource named after its machine: `ray start --resources='{"NAME": 1}'`.
    Raises PlanError for a way without a parameter server, or whose workers are no machines; InvalidValue.
    """
    servers = [item.name for item in way.rented if item.role == SERVER_ROLE]
    if not servers:
        raise PlanError(
            f"the way {way.way} has no parameter server; give one that has, such as spotdnn or cynthia, or train by "
            "its plan: funcpipe train"
        )
    known = {machine.name for machine in market.machines}
    rented = [item for item in way.rented if item.role != SERVER_ROLE]
    if strange := [item.name for item in rented if item.name not in known]:
        raise PlanError(
            f"{strange[0]} is no machine of the market {market.name}: functions do not reach a parameter server here; "
            "give a way on machines, such as spotdnn or cynthia"
        )
    on_nodes = parse_address(platform).is_shared
    slowest = min((market.compute_vcpu(market.machine(item.name)) for item in rented), default=1.0)
    workers = [
        ServerWorker(
            name=f"{item.name}-{number}",
            machine=item.name,
            speed=market.compute_vcpu(market.machine(item.name)) / slowest,
            spot=item.spot,
            resources={item.name: 1.0} if on_nodes else {},
        )
        for item in rented
        for number in range(item.count)
    ]
    return ServerCluster(
        workers=tuple(workers),
        server=servers[0],
        platform=platform,
        server_resources={servers[0]: 0.01} if on_nodes else {},
    )


@dataclass(frozen=True, kw_only=True)
class ServerResult:
    """What training around a parameter server has found and taken.

    `losses` are those of synchronous steps, `step_s` the seconds that each took, `computed_by` the samples of each by
    worker. `pushes` are those of asynchronous training, with their staleness. `lost` tells of workers that were lost.
    `bill` has an item for each machine; machines that are not of the market are not in it.
    """

    run: str
    updates: Updates
    seconds: float
    state: Mapping[str, Tensor]
    losses: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    computed_by: tuple[Mapping[str, int], ...] = ()
    pushes: tuple[PushRecord, ...] = ()
    lost: tuple[str, ...] = ()
    server_restarts: int = 0
    bill: tuple[CostItem, ...] = ()

    @property
    def usd(self) -> float:
        """All dollars."""
        return sum(item.usd for item in self.bill)

    @property
    def mean_staleness(self) -> float:
        """Of asynchronous pushes; 0 if there are none."""
        return sum(push.staleness for push in self.pushes) / max(len(self.pushes), 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained `state_dict`."""
        return dict(self.state)


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """How to train: the batches, when the server updates, how often it is saved, and who watches the cluster."""

    global_batch: int
    micro_batch: int
    updates: Updates = Updates.BSP
    save_every: int = 0
    watch: Watch = nothing_changes


def server_job_of(learner: Learner, dataset: Data, order: SampleOrder, settings: RunSettings, run: ServerRun) -> Job:
    """The job of training `learner` as one stage; raises what `make_job` raises, and PlanError."""
    made = make_job(learner, dataset, one_stage((), run.global_batch, run.micro_batch), order, settings)
    layers = [layer.name for layer in made.graph.layers]
    job = replace(
        made, plan=replace(one_stage(layers, run.global_batch, run.micro_batch), precision=made.plan.precision)
    )
    check_servable(job, run.updates)
    return job


def train_on_cluster(
    job: Job, cluster: ServerCluster, run: ServerRun, settings: RunSettings, market: Market
) -> ServerResult:
    """Train `job` around a parameter server on Ray.

    With `settings.storage` and a name, the server's state is saved there, and a run that is begun again under its name
    goes on from it. Raises InputError without Ray, PlatformRefused for a cluster with too few machines, WorkerFailed
    when no worker is left, NotFinite as the recipe says.
    """
    address = cluster.address
    if address.is_shared and settings.storage is None:
        raise InvalidValue("storage", None, "must be given with a Ray cluster: all its nodes read the data there")
    from funcpipe.parameter_server.ray_actors import RaySite
    from funcpipe.parameter_server.ray_crew import RayCrew
    from funcpipe.platforms.ray.connection import connected

    name = settings.resume or settings.name or new_run_name()
    with ExitStack() as stack:
        url = settings.storage
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="funcpipe-"))
            url = Path(folder).resolve().as_uri()
        site = RaySite(
            job=stored_job(job, open_storage(url), name),
            open_storage=functools.partial(open_storage, url),
            run=name,
            server_resources=cluster.server_resources,
            link_bytes_s=cluster.server_link_bytes_s,
        )
        stack.enter_context(connected(address, object_store_bytes=_OBJECT_STORE_BYTES))
        crew = stack.enter_context(RayCrew(site, cluster.workers))
        result = _trained(job, crew, run, name)
        if settings.storage is not None and not settings.keep_model:
            storage = open_storage(url)
            storage.delete_many(storage.list(f"{name}/server/"))
    return replace(result, bill=_bill(cluster, crew, market))


def _trained(job: Job, crew: "RayCrew", run: ServerRun, name: str) -> ServerResult:
    history, steps, began_s = History(), list[float](), time.monotonic()

    def watch(seen: object, done: float) -> None:
        while len(steps) < len(history.losses):
            steps.append(time.monotonic() - began_s)
        del steps[len(history.losses) :]
        run.watch(crew, done)

    course = Course(batches=job.batches, epochs=job.epochs, save_every=run.save_every, watch=watch)
    (train_synchronously if run.updates is Updates.BSP else train_asynchronously)(crew, course, history)
    if run.save_every:
        crew.save()
    ended_s = time.monotonic() - began_s
    ends = [*steps, *[ended_s] * (len(history.losses) - len(steps))]
    pushes = [replace(push, time_s=push.time_s - began_s) for push in history.pushes]
    mean = sum(push.samples for push in pushes) / max(len(pushes), 1)
    applied = 0
    for i, push in enumerate(pushes):
        applied += push.samples
        pushes[i] = replace(push, iterations=applied / mean)
    return ServerResult(
        run=name,
        updates=run.updates,
        seconds=ended_s,
        state=crew.state_dict(),
        losses=tuple(history.losses),
        step_s=tuple(end - before for before, end in zip([0.0, *ends], ends, strict=False)),
        computed_by=tuple(history.computed_by),
        pushes=tuple(pushes),
        lost=tuple(history.lost),
        server_restarts=history.server_restarts,
    )


def _bill(cluster: ServerCluster, crew: "RayCrew", market: Market) -> tuple[CostItem, ...]:
    """Each machine of the market, from when it was started to when it left; the server for all the time."""
    known = {machine.name for machine in market.machines}
    items = []
    for name, (worker, present_s) in crew.presence().items():
        if worker.machine in known:
            machine = market.machine(worker.machine)
            usd_h = machine.usd_h(spot=worker.spot) or machine.on_demand_usd_h
            items.append(CostItem(name=name, usd=usd_h * present_s / HOUR_S))
    if cluster.server in known:
        items.append(
            CostItem(name="server", usd=market.machine(cluster.server).on_demand_usd_h * crew.lifetime_s / HOUR_S)
        )
    return tuple(items)
