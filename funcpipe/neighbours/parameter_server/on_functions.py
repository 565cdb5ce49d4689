"""Training around a parameter server whose workers are functions: λDNN's way, with the server in this process."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.job_estimate import check_expected
from funcpipe.client.prepare.prepared_run import new_run_name
from funcpipe.client.prepare.session import Session, open_session, prices_at
from funcpipe.core import FunctionSize, Plan, PlatformSpec, RunLimits, RunSettings, ServerFunctionSpec, checks
from funcpipe.core.logs import wanted_in_functions
from funcpipe.core.market import HOUR_S, Market
from funcpipe.core.provision import CostItem, Provision
from funcpipe.core.stores import DEFAULT, urls_by_kind
from funcpipe.core.texts import time_text, usd_text
from funcpipe.errors import PlanError, RunHalted
from funcpipe.neighbours.parameter_server.function_connection import ServerKeys
from funcpipe.neighbours.parameter_server.function_group import FunctionSite, FunctionWorkerGroup
from funcpipe.neighbours.parameter_server.server import ServerJob
from funcpipe.neighbours.parameter_server.training import ServerResult, ServerRun, stored_job, trained
from funcpipe.neighbours.parameter_server.worker_group import ServerWorker, Updates, WorkerGroup
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import LOCAL, is_deployment, open_deployment
from funcpipe.platforms.local.output import keep_client_log
from funcpipe.runstate.generations import (
    delete_generation,
    find_objects,
    list_generations,
    refuse_foreign_objects,
    reserve_generation,
)
from funcpipe.runstate.halt import too_expensive
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import owned
from funcpipe.runstate.signing import KeyFolder, key_of

_log = logging.getLogger(__name__)

_STOPPING_S = 10.0
"""Seconds that functions may go on, and cost, after a run has reached a limit."""


@dataclass(frozen=True, kw_only=True)
class ServerFunctions:
    """Functions as workers around a parameter server: `workers` of at least `memory_mb`.

    `platform` is "local", or what `funcpipe deploy` made, by its URL. On the local one functions have the limits of the
    platform `like`, if it is given. The server is in the process that trains: run that on the machine `server` of the
    market, whose price is in the bill. `push` is how many micro-batches an asynchronous worker sums before it pushes.
    """

    workers: int
    memory_mb: int
    platform: str = LOCAL
    like: str | PlatformSpec | None = None
    server: str = ""
    push: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "memory_mb", "push"):
            checks.whole(name, getattr(self, name), 1)

    @property
    def server_workers(self) -> tuple[ServerWorker, ...]:
        """The workers, which are equal."""
        return tuple(ServerWorker(name=f"f{number}", push=self.push) for number in range(self.workers))


def train_on_functions(
    job: Job,
    functions: ServerFunctions,
    run: ServerRun,
    settings: RunSettings,
    market: Market,
    *,
    limits: RunLimits,
    way: Provision | None = None,
) -> ServerResult:
    """Train `job` around a parameter server in this process, whose workers are functions.

    What they exchange lies in `settings.storage`; by default in a temporary folder, or the deployment's own storage.
    `way` is the provision that the functions are of, if there is one.

    Raises PlanError, InvalidValue or PlatformRefused before anything starts; RunTaken if another client trains a run of
    that name; RunHalted at a limit; WorkerFailed when no worker is left, or a function fails as another would.
    """
    _check_enough_work(job, functions)
    if way is not None:
        seconds, usd = expected(way, job.steps)
        line = f"{way.way} is predicted to take {time_text(seconds)} and {usd_text(usd)} on {way.text}"
        check_expected(usd=usd, seconds=seconds, line=line, limits=limits)
    name = settings.resume or settings.name or new_run_name()
    with (
        open_session(functions.platform, functions.like, settings) as session,
        owned(session.storage, name),
        keep_client_log(name),
        _generation(session, name) as keys,
    ):
        platform = session.functions()
        size = _size(functions, platform.spec)
        platform.check(_as_plan(job, functions, size, platform.spec))
        sent = stored_job(job, session.storage, ServerKeys(keys).root)
        site = FunctionSite(
            job=sent,
            spec=_payload(keys, sent, size, platform, session, settings),
            platform=platform,
            storage=session.storage,
            gathers=run.updates is Updates.BSP,
        )
        prices = prices_at(platform.url, settings.prices or platform.spec, given=settings.prices is not None)
        with FunctionWorkerGroup(site, functions.server_workers) as group:
            bill = _Bill(functions, size, prices, market, session, group)
            guarded = replace(run, watch=_guarded(run, limits, bill, group, name, lasts=session.lasts))
            result = trained(job, group, guarded, name, session.storage)
        if session.lasts and not settings.keep_model:
            session.storage.delete_many(find_objects(session.storage, f"{name}/server/").own)
        return replace(result, bill=bill.items())


def expected(way: Provision, steps: int) -> tuple[float, float]:
    """The seconds and the dollars that `steps` iterations take by a prediction that may be of another number."""
    seconds = way.start_s + (way.seconds - way.start_s) * steps / way.iterations
    return seconds, way.usd * seconds / way.seconds


class _Bill:
    """The cost of a run: each worker's functions, storage requests, and the server's machine while there is one."""

    def __init__(
        self,
        functions: ServerFunctions,
        size: FunctionSize,
        prices: PlatformSpec,
        market: Market,
        session: Session,
        group: FunctionWorkerGroup,
    ) -> None:
        self._size, self._prices, self._group, self._session = size, prices, group, session
        known = {machine.name for machine in market.machines}
        machine = market.machine(functions.server) if functions.server in known else None
        self._server_usd_s = 0.0 if machine is None else machine.on_demand_usd_h / HOUR_S
        self._is_free = _is_free(session)
        self.usd_s = functions.workers * size.price_usd_s + self._server_usd_s

    def items(self) -> tuple[CostItem, ...]:
        """The bill until now."""
        used, items = self._group.used(), []
        for name, own in used.items():
            usd = own.functions * self._prices.price_invocation_usd + own.seconds * self._size.price_usd_s
            items.append(CostItem(name=name, usd=usd))
        if not self._is_free:
            requests = sum((own.requests for own in used.values()), self._session.meter.counts)
            items.append(CostItem(name="requests", usd=self._prices.store(DEFAULT).counted_usd(requests)))
        if self._server_usd_s:  # of a machine in the functions' region, where downloads cost nothing
            items.append(CostItem(name="server", usd=self._server_usd_s * self._group.lifetime_s))
        elif not self._is_free and (usd := self._prices.traffic_usd(self._session.meter.counts.received_bytes)):
            items.append(CostItem(name="traffic", usd=usd))
        return tuple(items)


def _is_free(session: Session) -> bool:
    """Return True if storage requests cost nothing: to a server or a folder of a machine that is paid for anyhow.

    A folder beside functions that are like a platform's stands for that platform's storage.
    """
    scheme = urlsplit(urls_by_kind(session.storage_url)[DEFAULT]).scheme
    return scheme in ("redis", "rediss") or (scheme == "file" and session.like is None)


def _guarded(
    run: ServerRun, limits: RunLimits, bill: _Bill, group: FunctionWorkerGroup, name: str, *, lasts: bool
) -> Callable[[WorkerGroup, float], None]:
    """The watch of `run`, which ends the run before it exceeds a limit. Raises RunHalted."""

    def watch(seen: WorkerGroup, done: float) -> None:
        reason = _exceeded(limits, bill, group.lifetime_s)
        if reason is not None and done < 1:
            goes_on = ""
            if lasts:
                group.save()
                goes_on = "; under the same name, with a higher limit, it goes on from there"
            raise RunHalted(f"run {name} was stopped after {group.progress().version} updates: {reason}{goes_on}")
        run.watch(seen, done)

    return watch


def _exceeded(limits: RunLimits, bill: _Bill, elapsed_s: float) -> str | None:
    if limits.max_usd is not None:
        spent_usd = sum(item.usd for item in bill.items())
        if spent_usd + _STOPPING_S * bill.usd_s > limits.max_usd:
            return too_expensive(limits.max_usd)
    if limits.deadline_s is not None and elapsed_s + _STOPPING_S > limits.deadline_s:
        return f"it would take longer than {limits.deadline_s:g} s"
    return None


@contextlib.contextmanager
def _generation(session: Session, name: str) -> Iterator[Keys]:
    """The keys of what this client and its functions exchange, all of which is deleted afterwards.

    So is what clients have left that have died, unless it is of a run that can be resumed. Raises InvalidValue for a
    name below which others have objects.
    """
    refuse_foreign_objects(session.storage, name)
    keys = reserve_generation(session.storage, name)
    for other in list_generations(session.storage, name):
        if other != keys and not session.storage.list(other.record):
            delete_generation(session.storage, other)
    try:
        yield keys
    finally:
        delete_generation(session.storage, keys)


def _payload(
    keys: Keys, sent: ServerJob, size: FunctionSize, platform: Platform, session: Session, settings: RunSettings
) -> ServerFunctionSpec:
    return ServerFunctionSpec(
        run=keys.run,
        worker="f0",
        attempt=0,
        size=size.name,
        memory_mb=size.memory_mb,
        storage=session.storage_url,
        bundle_sha256=hashlib.sha256(sent.bundle).hexdigest(),
        seed=sent.seed,
        message_deadline_s=settings.message_deadline_s,
        generation=keys.generation,
        nonce=keys.nonce,
        lifetime_s=platform.spec.lifetime_s,
        log_level=wanted_in_functions(),
        run_key=key_of(KeyFolder(), keys).text,
    )


def _check_enough_work(job: Job, functions: ServerFunctions) -> None:
    plan = job.plan
    micro_batches = -(-plan.global_batch // plan.micro_batch)
    if functions.workers > micro_batches:
        raise PlanError(
            f"a global batch of {plan.global_batch} has {micro_batches} micro-batches of {plan.micro_batch}, and of "
            f"{functions.workers} functions some would have nothing to do; take smaller micro-batches"
        )


def _size(functions: ServerFunctions, spec: PlatformSpec) -> FunctionSize:
    """The smallest size with enough memory, of those that are deployed if one fits; of several, the fastest."""
    offered = [size for size in spec.sizes if size.memory_mb >= functions.memory_mb]
    if not offered:
        raise PlanError(
            f"functions of {functions.memory_mb} MB are asked for, and the largest of {spec.name} have "
            f"{spec.sizes[-1].memory_mb}; take less memory, with a smaller micro-batch"
        )
    if is_deployment(functions.platform):
        deployed = open_deployment(functions.platform).of_deployed_sizes().spec.sizes
        offered = [size for size in offered if size in deployed] or offered
    return min(offered, key=lambda size: (size.memory_mb, -size.vcpu))


def _as_plan(job: Job, functions: ServerFunctions, size: FunctionSize, spec: PlatformSpec) -> Plan:
    """So many functions of that size, for the platform to check."""
    stage = replace(job.plan.stages[0], size=size.name, memory_mb=size.memory_mb)
    micro_batches = -(-job.plan.global_batch // job.plan.micro_batch)
    return replace(
        job.plan,
        global_batch=functions.workers * micro_batches * job.plan.micro_batch,
        replicas=functions.workers,
        platform=spec.name,
        stages=(stage,),
    )
