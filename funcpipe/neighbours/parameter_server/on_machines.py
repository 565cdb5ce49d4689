"""Training around a parameter server on machines, from beginning to end: the cluster, the run, the bill.

A `Replanner` watches a run on spot machines. When some are taken back, the survivors go on at once; spotDNN's model
says what to rent beside them so that the deadline is still met, and those workers join when they are ready. A type of
machine of which one was taken back is not asked for again. If nothing makes the deadline, the survivors go on alone.
"""

import functools
import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from funcpipe.client.prepare.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.prepare.prepared_run import new_run_name
from funcpipe.core import PlatformSpec, RunLimits, RunSettings
from funcpipe.core.distribution import install_command
from funcpipe.core.market import HOUR_S, Market
from funcpipe.core.process import temporary_folder
from funcpipe.core.provision import SERVER_ROLE, CostItem, Provision, Rented
from funcpipe.core.settings import LAST
from funcpipe.errors import Infeasible, InputError, InvalidValue, PlanError
from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions
from funcpipe.neighbours.parameter_server.training import (
    ServerResult,
    ServerRun,
    check_servable,
    one_stage,
    stored_job,
    trained,
)
from funcpipe.neighbours.parameter_server.worker_group import ServerWorker, WorkerGroup
from funcpipe.neighbours.provisioning.goal import Goal
from funcpipe.neighbours.provisioning.lambdadnn import memory_of
from funcpipe.neighbours.provisioning.spotdnn import SpotSystem, SpotType, replan
from funcpipe.platforms.catalog import LOCAL, open_storage
from funcpipe.platforms.ray.cluster import RayAddress, Via, parse_address
from funcpipe.runstate.generations import find_objects, refuse_foreign_objects
from funcpipe.training.data_source import Data

if TYPE_CHECKING:
    from funcpipe.neighbours.parameter_server.ray_group import RayWorkerGroup


RAY_HERE = "ray://local"
_OBJECT_STORE_BYTES = 256 << 20  # of a Ray that is started here: parameters and gradients pass through it


@dataclass(frozen=True, kw_only=True)
class ServerCluster:
    """A cluster for training around a parameter server: `workers`, and the machine `server` of the market.

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


def cluster_of(
    way: Provision, market: Market, *, platform: str | None = None, like: str | PlatformSpec | None = None
) -> ServerCluster | ServerFunctions:
    """The resources that a provision rents: machines with the speeds that the market gives, or functions.

    `platform` is where those are: processes of this machine, or functions of it, unless it says otherwise. Machines
    need Ray, this one too, where it starts the processes. In a Ray cluster each node must have a resource named after
    its machine: `ray start --resources='{"NAME": 1}'`. Local functions have the limits of `like`. Raises PlanError for
    a way without a parameter server; InvalidValue; InputError where Ray is missing.
    """
    servers = [item.name for item in way.rented if item.role == SERVER_ROLE]
    if not servers:
        raise PlanError(
            f"the way {way.way} has no parameter server; give one that has, such as lambdadnn, spotdnn or cynthia, or "
            "train by its plan"
        )
    rented = [item for item in way.rented if item.role != SERVER_ROLE]
    if len(rented) == 1 and (memory_mb := memory_of(rented[0])) is not None:
        return ServerFunctions(
            workers=rented[0].count,
            memory_mb=memory_mb,
            platform=platform or LOCAL,
            like=like,
            server=servers[0],
        )
    if like is not None:
        raise InvalidValue("like", like, f"is for functions, and {way.way} trains on machines")
    if importlib.util.find_spec("ray") is None:
        raise InputError(
            f"{way.way} trains on machines: its server and its workers are actors of Ray, on this machine too, and ray "
            f"is not installed; run: {install_command('ray')}, or take a way on functions, such as lambdadnn"
        )
    return _machines(way, rented, servers[0], market, platform or RAY_HERE)


def check_given(
    cluster: ServerCluster | ServerFunctions, *, like: str | PlatformSpec | None, limits: RunLimits
) -> None:
    """Raise InvalidValue for what would have no effect: `like` beside a cluster by hand, limits on machines."""
    if like is not None:
        raise InvalidValue("like", like, "goes with a provision; ServerFunctions has its own")
    given = {name: value for name in ("max_usd", "deadline_s") if (value := getattr(limits, name)) is not None}
    if given and isinstance(cluster, ServerCluster):
        raise InvalidValue("limits", given, "hold for functions alone: machines are rented, and ended, by others")


def _machines(way: Provision, rented: Sequence[Rented], server: str, market: Market, platform: str) -> ServerCluster:
    known = {machine.name for machine in market.machines}
    if strange := [item.name for item in rented if item.name not in known]:
        raise PlanError(
            f"{strange[0]}, which {way.way} rents, is no machine of the market {market.name}; give the market that the "
            "provision was made for"
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
        server=server,
        platform=platform,
        server_resources={server: 0.01} if on_nodes else {},
    )


def server_job_of(learner: Learner, dataset: Data, order: SampleOrder, settings: RunSettings, run: ServerRun) -> Job:
    """The job of training `learner` as one stage; raises what `make_job` raises, and PlanError."""
    if settings.resume == LAST:
        raise InvalidValue("resume", LAST, "must be the name of the run, for training around a server")
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
    from funcpipe.neighbours.parameter_server.ray_group import RaySite, RayWorkerGroup
    from funcpipe.platforms.ray.connection import connected

    name = settings.resume or settings.name or new_run_name()
    with ExitStack() as stack:
        url = settings.storage
        if url is None:
            folder = stack.enter_context(temporary_folder())
            url = Path(folder).resolve().as_uri()
        storage = open_storage(url)
        refuse_foreign_objects(storage, name)
        site = RaySite(
            job=stored_job(job, storage, name),
            open_storage=functools.partial(open_storage, url, first_s=None),
            run=name,
            server_resources=cluster.server_resources,
            link_bytes_s=cluster.server_link_bytes_s,
        )
        stack.enter_context(connected(address, object_store_bytes=_OBJECT_STORE_BYTES))
        group = stack.enter_context(RayWorkerGroup(site, cluster.workers))
        result = trained(job, group, run, name, storage)
        if settings.storage is not None and not settings.keep_model:
            storage.delete_many(find_objects(storage, f"{name}/server/").own)
    return replace(result, bill=_bill(cluster, group, market))


def _bill(cluster: ServerCluster, group: "RayWorkerGroup", market: Market) -> tuple[CostItem, ...]:
    """Each machine of the market, from when it was started to when it left; the server for all the time."""
    known = {machine.name for machine in market.machines}
    items = []
    for name, (worker, present_s) in group.presence().items():
        if worker.machine in known:
            machine = market.machine(worker.machine)
            usd_h = machine.usd_h(spot=worker.spot) or machine.on_demand_usd_h
            items.append(CostItem(name=name, usd=usd_h * present_s / HOUR_S))
    if cluster.server in known:
        items.append(
            CostItem(name="server", usd=market.machine(cluster.server).on_demand_usd_h * group.lifetime_s / HOUR_S)
        )
    return tuple(items)


_log = logging.getLogger(__name__)

Notices = Callable[[], Sequence[str]]
"""The names of workers whose machines are about to be taken back, each reported once or more often."""

Rent = Callable[[Sequence[ServerWorker]], None]
"""A function that orders the machines of these workers; they start when their nodes have joined Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A revocation at `time_s` of the run, when the share `done` of it was done.

    `plan` is what the survivors and those that `joined` make together; None if nothing meets the deadline.
    """

    time_s: float
    done: float
    left: tuple[str, ...]
    joined: tuple[str, ...]
    plan: Provision | None


@dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """The parts of a new plan: the job's goal, with its deadline in seconds, and spotDNN's view of the market.

    Machines that join take `overhead_s`.
    """

    goal: Goal
    types: tuple[SpotType, ...]
    system: SpotSystem
    overhead_s: float = 30.0

    def beside(
        self, survivors: Sequence[ServerWorker], gone: Sequence[str], *, done: float, elapsed_s: float
    ) -> tuple[Provision, tuple[tuple[SpotType, int], ...]]:
        """The new plan, and how many more of each type it rents; `gone` are types to be had no more.

        Raises Infeasible.
        """
        counts = tuple(sum(worker.machine == kind.name for worker in survivors) for kind in self.types)
        types = tuple(
            replace(kind, quota=count if kind.name in gone else max(kind.quota, count))
            for kind, count in zip(self.types, counts, strict=True)
        )
        remaining_s = max(self.goal.deadline_s - elapsed_s, 1e-9)
        plan = replan(
            self.goal, types, self.system, counts, done=done, remaining_s=remaining_s, overhead_s=self.overhead_s
        )
        rented = {item.name: item.count for item in plan.rented if item.role == "worker"}
        more = ((kind, rented.get(kind.name, 0) - n) for kind, n in zip(types, counts, strict=True))
        return plan, tuple((kind, count) for kind, count in more if count > 0)


class Replanner:
    """A watch for runs on spot machines; `revocations` records what it has seen and done."""

    def __init__(
        self,
        plan: SpotPlan,
        notices: Notices,
        rent: Rent,
        *,
        like: Callable[[SpotType, str], ServerWorker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`like` makes the worker of a type of machine, under a name. The deadline counts from now on."""
        self._plan, self._notices, self._rent, self._like, self._clock = plan, notices, rent, like, clock
        self._began_s = clock()
        self._known: dict[str, ServerWorker] = {}
        self._starting: set[str] = set()
        self._gone: set[str] = set()
        self.revocations: list[Revocation] = []

    def __call__(self, group: WorkerGroup, done: float) -> None:
        """Handle machines that leave, or have left without notice."""
        present = {worker.name: worker for worker in group.workers}
        self._starting -= present.keys()
        vanished = self._known.keys() - present.keys() - self._starting
        self._known |= present
        noticed = {name for name in self._notices() if name in present}
        leaving = sorted(vanished | noticed)
        if not leaving:
            return
        for name in sorted(noticed):
            group.leave(name)
        left = [self._known.pop(name) for name in leaving]
        self._gone |= {worker.machine for worker in left}
        self._add(group, done, left)

    def _add(self, group: WorkerGroup, done: float, left: Sequence[ServerWorker]) -> None:
        elapsed_s = self._clock() - self._began_s
        survivors = tuple(self._known.values())
        plan: Provision | None = None
        joining: list[ServerWorker] = []
        try:
            plan, more = self._plan.beside(survivors, sorted(self._gone), done=min(done, 0.999), elapsed_s=elapsed_s)
        except Infeasible as error:
            _log.warning("no machine is added: %s", error)
        else:
            number = len(self.revocations) + 1
            joining = [self._like(kind, f"{kind.name}-r{number}.{i}") for kind, count in more for i in range(count)]
        if joining:
            self._rent(joining)
        for worker in joining:
            self._known[worker.name] = worker
            self._starting.add(worker.name)
            group.join(worker)
        names = tuple(worker.name for worker in left), tuple(worker.name for worker in joining)
        _log.warning("%s left; %s joins", ", ".join(names[0]), ", ".join(names[1]) or "no worker")
        self.revocations.append(Revocation(time_s=elapsed_s, done=done, left=names[0], joined=names[1], plan=plan))
