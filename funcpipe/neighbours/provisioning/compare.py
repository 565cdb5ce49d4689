"""Every way to do a job beside the others, with their fronts, a picture of them, and which one to take."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import JobShape
from funcpipe.core import FaultTolerance, JobEstimate, ModelProfile, Plan, PlatformSpec, TrainingSpec
from funcpipe.core.distribution import needed_from
from funcpipe.core.loss_model import LossModel
from funcpipe.core.market import Market
from funcpipe.core.provision import JobSpec, Provision, ProvisionTable, Refusal
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.neighbours.provisioning import workload
from funcpipe.neighbours.provisioning.cynthia import Mode, cynthia
from funcpipe.neighbours.provisioning.goal import Goal, aimed_deadline_s
from funcpipe.neighbours.provisioning.lambdadnn import (
    FunctionMarket,
    FunctionWorkload,
    exhaustive,
    lambdadnn,
    naive,
    siren_like,
)
from funcpipe.neighbours.provisioning.spotdnn import (
    ENUMERATED,
    Space,
    SpotPrediction,
    exhaustive_search,
    spot_provision,
    spotdnn,
)
from funcpipe.neighbours.provisioning.without_server import JobEstimator, funcpipe, funcpipe_front, here, one_machine
from funcpipe.platforms.catalog import LOCAL, load_market, load_spec, offer_at

WAYS = ("funcpipe", "here", "lambdadnn", "siren-like", "naive", "cynthia-bsp", "cynthia-asp", "spotdnn", "one-machine")
ORACLES = ("exhaustive-functions", "exhaustive-spot")
"""Ways that try all configurations, to compare with where there are not too many."""

_FACTORS = (0.03, 0.06, 0.12, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)

Way = Callable[[Goal], Provision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of all ways. `training` says how FuncPipe trains; its batch, deadline and budget are the job's."""

    profile: ModelProfile
    spec: PlatformSpec
    market: Market
    job: JobSpec
    estimate: JobEstimator
    training: TrainingSpec
    loss: LossModel | None = None
    count_server: bool = False


def ways_of(inputs: Inputs) -> Mapping[str, Way]:
    """Each way by its name, as a function of the goal alone."""
    job, market = inputs.job, inputs.market
    work = workload.model_workload(inputs.profile, inputs.spec, inputs.training.optimizer)
    types = workload.spot_types(work, market, job)
    system = workload.spot_system(work, market, types, count_server=inputs.count_server)
    cluster, workers = workload.cluster_workload(work, job), workload.worker_types(work, market)
    server, start_s = workload.server_type(market), market.start_s
    training = replace(inputs.training, global_batch=job.global_batch, deadline_s=None, budget_usd=None)

    def functions() -> tuple[FunctionWorkload, FunctionMarket]:
        view = workload.function_workload(work, inputs.profile, inputs.spec, job)
        return view, workload.function_market(inputs.spec, market)

    def all_spot(goal: Goal) -> Provision:
        goal.check()
        space = Space(types, system, goal)
        if space.size > ENUMERATED:
            raise Infeasible(f"exhaustive-spot: {space.size} combinations are too many; lower the quotas of the market")
        found: SpotPrediction | None = exhaustive_search(space)
        if found is None:
            raise Infeasible(f"exhaustive-spot: none of {space.size} combinations makes {goal.deadline_s:.0f} s")
        why = "all combinations were tried"
        return spot_provision("exhaustive-spot", goal, found, space, why=why, replace_s=market.replace_s)

    def by_cynthia(mode: Mode) -> Way:
        return lambda goal: cynthia(goal, workers, work=cluster, server=server, mode=mode, start_s=start_s)

    return {
        "funcpipe": lambda goal: funcpipe(goal, inputs.profile, inputs.spec, training, inputs.estimate),
        "here": lambda goal: here(goal, inputs.profile, inputs.spec, training, offer_at(LOCAL), inputs.estimate),
        "lambdadnn": lambda goal: lambdadnn(goal, *functions(), count_server=inputs.count_server),
        "siren-like": lambda goal: siren_like(goal, *functions()),
        "naive": lambda goal: naive(goal, *functions()),
        "cynthia-bsp": by_cynthia(Mode.BSP),
        "cynthia-asp": by_cynthia(Mode.ASP),
        "spotdnn": lambda goal: spotdnn(goal, types, system, replace_s=market.replace_s),
        "one-machine": lambda goal: one_machine(goal, work, market),
        "exhaustive-functions": lambda goal: exhaustive(goal, *functions()),
        "exhaustive-spot": all_spot,
    }


def compare(inputs: Inputs, ways: Sequence[str] | None = None) -> ProvisionTable:
    """Every one of `ways`, by default of `WAYS`: what it rents, or why it cannot; the cheapest first, with the one to
    take.
    """
    known, ways = ways_of(inputs), WAYS if ways is None else ways
    for name in ways:
        if name not in known:
            raise InvalidValue("ways", name, f"must be some of {', '.join(known)}")
    provisions, refusals = [], []
    for name in ways:
        try:
            provisions.append(within_budget(with_margin(known[name], goal_of(inputs)), inputs.job))
        except Infeasible as error:
            refusals.append(Refusal(way=name, reason=str(error)))
    provisions.sort(key=lambda one: (one.usd, one.seconds))
    recommended, why = recommend(provisions, inputs.job)
    return ProvisionTable(
        job=inputs.job,
        model=inputs.profile.model,
        platform=inputs.spec.name,
        market=inputs.market.name,
        provisions=tuple(provisions),
        refusals=tuple(refusals),
        recommended=None if recommended is None else recommended.way,
        why=why,
        assumptions=(*workload.ASSUMPTIONS, *_scaled(inputs.profile), *filter(None, (inputs.spec.prices_note(),))),
        market_assumptions=inputs.market.assumptions,
    )


def goal_of(inputs: Inputs) -> Goal:
    """The goal of the job, with the deadline as it was given."""
    deadline_s = math.inf if inputs.job.deadline_s is None else inputs.job.deadline_s
    return Goal(job=inputs.job, loss=inputs.loss, deadline_s=deadline_s)


def with_margin(way: Way, goal: Goal) -> Provision:
    """Plan by `way` for a time early enough to miss the deadline no more often than allowed, or for the deadline."""
    early_s = aimed_deadline_s(goal.job.deadline_s, goal.job.miss_chance, goal.spread())
    try:
        return way(replace(goal, deadline_s=early_s))
    except Infeasible:
        if early_s >= goal.deadline_s:
            raise
        return way(goal)


def within_budget(found: Provision, job: JobSpec) -> Provision:
    """`found`; raises Infeasible if it costs more than the budget."""
    if job.budget_usd is not None and found.usd > job.budget_usd:
        raise Infeasible(
            f"{found.way}: {found.text} would cost {found.usd:.2f} dollars, the budget is {job.budget_usd:.2f}; "
            "allow more dollars or more time"
        )
    return found


def recommend(provisions: Sequence[Provision], job: JobSpec) -> tuple[Provision | None, str]:
    """The cheapest that is sure enough; with only a budget the fastest within it; or the surest, if none is enough."""
    if not provisions:
        return None, "no way can do the job: the reasons are given for each"

    def worth_usd(one: Provision) -> float:
        return job.worth_usd(one.seconds, one.usd)

    worth = f", an hour worth ${job.time_value:g}" if job.time_value else ""
    if job.deadline_s is None:
        if job.budget_usd is not None:
            return min(provisions, key=lambda one: one.seconds), f"the fastest within {job.budget_usd:.2f} dollars"
        return min(provisions, key=worth_usd), f"the cheapest{worth}; there is no deadline"
    sure = [one for one in provisions if (one.miss_chance or 0.0) <= job.miss_chance + 1e-6]
    if sure:
        best = min(sure, key=worth_usd)
        return best, f"the cheapest that misses the deadline with a chance of at most {job.miss_chance:.0%}{worth}"
    best = min(provisions, key=lambda one: (one.miss_chance or 0.0, one.usd))
    return best, f"none is as sure as wanted ({job.miss_chance:.0%}); this one is the surest"


def fronts(inputs: Inputs, table: ProvisionTable) -> Mapping[str, tuple[Provision, ...]]:
    """The provisions of each way of `table` for shorter and longer deadlines, without those that another beats."""
    base_s = inputs.job.deadline_s or max((one.seconds for one in table.provisions), default=3600.0)
    ways, found = ways_of(inputs), {}
    free = replace(inputs.job, deadline_s=None, budget_usd=None)
    goal = Goal(job=free, loss=inputs.loss)
    for name in [one.way for one in table.provisions]:
        if name == "funcpipe":
            training = replace(inputs.training, global_batch=free.global_batch, deadline_s=None, budget_usd=None)
            every = list(funcpipe_front(goal, inputs.profile, inputs.spec, training, inputs.estimate))
        else:
            every = list(_for_deadlines(ways[name], goal, base_s))
        found[name] = undominated(every)
    return found


def undominated(found: Sequence[Provision]) -> tuple[Provision, ...]:
    """The provisions that are cheaper than all faster ones, the fastest first."""
    kept: list[Provision] = []
    for one in sorted(found, key=lambda one: (one.seconds, one.usd)):
        if not kept or one.usd < kept[-1].usd:
            kept.append(one)
    return tuple(kept)


def _for_deadlines(way: Way, goal: Goal, base_s: float) -> Iterator[Provision]:
    for factor in _FACTORS:
        try:
            yield way(replace(goal, deadline_s=factor * base_s))
        except Infeasible:
            continue


def _scaled(profile: ModelProfile) -> tuple[str, ...]:
    note = "seconds of the profile were scaled from another machine to the functions' vCPUs"
    return (note,) if profile.estimated else ()


def provision_inputs(
    profile: ModelProfile,
    job: JobSpec,
    *,
    spec: PlatformSpec | None = None,
    market: Market | str = "aws",
    loss: LossModel | None = None,
    training: TrainingSpec | None = None,
    count_server: bool = False,
    faults: FaultTolerance = DEFAULT_FAULTS,
) -> Inputs:
    """The inputs of all ways; `spec` is by default the profile's platform.

    `market` may be a name or a file: its GPUs are as fast as their published rates allow for this model. GPUs of a
    Market are as fast as it says.
    """
    platform = spec or load_spec(profile.platform)
    return Inputs(
        profile=profile,
        spec=platform,
        market=workload.at_roofline(load_market(market), profile, platform) if isinstance(market, str) else market,
        job=job,
        estimate=_estimator(job, platform, faults),
        training=training or TrainingSpec(global_batch=job.global_batch),
        loss=loss,
        count_server=count_server,
    )


def provision_table(
    profile: ModelProfile,
    job: JobSpec,
    *,
    spec: PlatformSpec | None = None,
    market: Market | str = "aws",
    loss: LossModel | None = None,
    training: TrainingSpec | None = None,
    count_server: bool = False,
    faults: FaultTolerance = DEFAULT_FAULTS,
    ways: Sequence[str] | None = None,
) -> ProvisionTable:
    """Every way to do `job`, on functions and on machines: seconds, dollars, the chance to miss, the one to take.

    `loss` says how long a target loss takes (`funcpipe provision fit-loss`). `training` says how FuncPipe trains:
    formats, optimiser, replicas. With `ways`, only these are compared. With `count_server`, λDNN and spotDNN
    count the parameter server when they search, which their papers leave out; the bill always does. Raises InvalidValue
    for an unknown way, market or platform.
    """
    inputs = provision_inputs(
        profile, job, spec=spec, market=market, loss=loss, training=training, count_server=count_server, faults=faults
    )
    return compare(inputs, ways)


def _estimator(job: JobSpec, spec: PlatformSpec, faults: FaultTolerance) -> Callable[[Plan, int], JobEstimate]:
    def estimate(plan: Plan, steps: int) -> JobEstimate:
        epochs = max(1, round(steps * job.global_batch / job.samples))
        prices = spec if plan.platform == spec.name else None
        return estimate_job(plan, JobShape(epochs=epochs, steps=steps), faults=faults, prices=prices)

    return estimate


def draw(table: ProvisionTable, fronts: Mapping[str, tuple[Provision, ...]], path: str | Path) -> None:
    """Draw `fronts` into the file `path`, its kind after the ending; what `table` holds is marked, its choice starred.

    Needs matplotlib, which is imported only here.
    """
    with needed_from("figures"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, front in fronts.items():
        points = [(one.seconds / 3600, one.usd) for one in front]
        (line,) = axes.plot(*zip(*points, strict=True), marker=".", drawstyle="steps-post", linewidth=1, label=name)
        (chosen,) = [one for one in table.provisions if one.way == name]
        marker, size = ("*", 14) if name == table.recommended else ("o", 6)
        axes.plot(
            chosen.seconds / 3600, chosen.usd, marker=marker, markersize=size, linestyle="none", color=line.get_color()
        )
    if table.job.deadline_s is not None:
        axes.axvline(table.job.deadline_s / 3600, linestyle="--", linewidth=1, color="grey", label="deadline")
    if table.job.budget_usd is not None:
        axes.axhline(table.job.budget_usd, linestyle=":", linewidth=1, color="grey", label="budget")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("hours for the whole job")
    axes.set_ylabel("dollars for the whole job")
    axes.set_title(f"{table.model} to {table.job.goal}: {table.platform}, {table.market}; star: recommended")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
