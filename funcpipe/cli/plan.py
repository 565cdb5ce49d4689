"""The verbs optimize, explain and simulate.

Each imports what it needs itself, so that planning loads neither torch nor a cloud library.
"""

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from funcpipe import show
from funcpipe.cli.files import write_file
from funcpipe.cli.measure import PROFILE, planned_platform
from funcpipe.cli.options import Choice, argument, group, not_negative, option, positive, whole
from funcpipe.cli.report import observed_here, with_observed
from funcpipe.cli.verbs import Options, fields_of, verb
from funcpipe.core import (
    SYNC_WIRES,
    Coupled,
    ModelProfile,
    Plan,
    PlanRequest,
    PlatformSpec,
    ScheduleKind,
    Stores,
    Sync,
    TrainingSpec,
    Wire,
    read,
    to_text,
    write,
    write_trace,
)
from funcpipe.core.json_form import to_plain
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from funcpipe.core import Pins
    from funcpipe.partitioner.alternatives import Planner
    from funcpipe.scheduler.simulator.disturbances import Disturbances, Worker


def _degrees(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--replicas takes whole numbers separated by commas, got {text!r}") from None


def _stores(text: str) -> Stores:
    """The stores that plans may use: a word for all kinds, or the store of some of them."""
    if "=" not in text:
        return Stores.of(text)
    pairs = [part.partition("=") for part in text.split(",")]
    return Stores.of({kind.strip(): name.strip() for kind, _, name in pairs})


def _sync_every(text: str) -> int | str:
    """A number of steps; another word is for `TrainingSpec` to judge."""
    return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text


_GOAL = group(
    "goal: The cheapest iteration, unless one of the first three says otherwise.",
    option("--time-value USD_PER_HOUR", "what saving an hour is worth", not_negative, 0.0, one_of="goal"),
    option("--deadline SECONDS", "the cheapest iteration within this time", positive, one_of="goal"),
    option("--budget USD", "the fastest iteration within this budget", positive, one_of="goal"),
    option("--iterations N", "--deadline and --budget cover N iterations together", whole(), 1),
)

_TRAINING = group(
    "training",
    option("--optimizer", "optimiser, by the state that it keeps", of=TrainingSpec),
    option("--wire", "number format in which activations travel", of=TrainingSpec),
    option("--wire-back", "number format of their gradients", Choice(Wire, none="same"), "same"),
    option("--wire-sync", "number format in which replicas sum gradients", Choice(SYNC_WIRES), of=TrainingSpec),
    option(
        "--numerics", "may what would travel in fp32 travel in bf16, or in int8, where that is better", of=TrainingSpec
    ),
    option("--recompute", "may stages recompute to save memory", of=TrainingSpec),
    option("--schedule", "order of the micro-batches", Choice(ScheduleKind, none="auto"), "auto"),
    option("--sync", "how replicas sum their gradients", Choice(Sync, none="auto"), "auto"),
    option(
        "--sync-every N|auto|end",
        "let replicas train alone, and meet after N steps; `end` for once, at the end of a run; `auto` chooses among "
        "those that --sync-every-at-most admits",
        _sync_every,
        "1",
    ),
    option("--sync-every-at-most N", "with --sync-every auto: no more steps than this", whole()),
    option("--outer-lr RATE", "how far replicas go to their mean when they meet", positive, of=TrainingSpec),
    option("--outer-momentum MU", "the Nesterov momentum of that", not_negative, of=TrainingSpec),
    option(
        "--sync-fragments F",
        "let the parameters of each stage meet in F parts, each N/F steps after the one before",
        whole(),
        of=TrainingSpec,
    ),
    option(
        "--sync-delay K",
        "let what replicas meet on reach them K steps later, and travel while they train",
        whole(0),
        of=TrainingSpec,
    ),
    option("--shard-optimizer", "divide the optimiser's state among replicas (ZeRO stage 1)"),
    option(
        "--stores KIND=STORE",
        "which stores of the platform the plan may use: `default` alone, `auto` for whichever are best, or by "
        "kind, such as messages=express,sums=auto",
        _stores,
        "default",
    ),
    option("--averaged", "leave room for an average of the parameters (train --ema)"),
    option(
        "--coupled",
        "`cache` plans for a loss that is computed once for the whole global batch, from the outputs of all "
        "micro-batches (train --coupled cache); the others do not change a plan",
        Coupled,
    ),
    option("--replicas N,N", "degrees of data parallelism to consider (default: all that divide the batch)", _degrees),
    option("--global-batch N", "samples per iteration, over all replicas", whole(), needed=True),
)
"""The options of training; `auto` leaves the choice to the planner."""

_PINS = group(
    "pins: Decisions that the plan must follow. The first three may be repeated.",
    option("--cut LAYER ...", "begin a stage with this layer", to="cuts"),
    option("--together LAYER,LAYER ...", "keep these layers, and all between them, in one stage"),
    option("--size LAYER=SIZE ...", "run this layer on functions of this size"),
    option("--memory MB", "give every function this much memory", whole(), to="memory_mb"),
    option("--max-memory MB", "give no function more memory than this", whole(), to="max_memory_mb"),
    option("--max-functions N", "run no more functions than this at once", whole()),
)

_SEARCH = group(
    "search",
    option(
        "--solver NAME",
        "`exact` for the built-in search with proof, or a solver: gurobi, scip, highs, "
        "or mip for the first of these that is installed; `paper` for the paper's own program; `auto` is exact",
        None,
        "auto",
    ),
    option("--time-limit SECONDS", "stop searching after this time", positive),
    option(
        "--simulate N",
        "simulate an iteration of the best N plans that differ in cuts, replicas or schedule, and take the best",
        whole(),
    ),
    option(
        "--policy NAME",
        "plan by the rules of another system, such as pipedream or lambdaml; see docs/planning.md",
        None,
        "funcpipe",
    ),
    option("--pareto", "print every plan that no other beats in both time and money", key=""),
    option("--figure FILE", "with --pareto: draw those plans (needs matplotlib)", key="", writes=""),
    option(
        "--what-if NAME=VALUE ...",
        "compare today's plan with the best one after a change, and write that one. May be repeated. "
        "bandwidth=2x, price=0.5x, request_price=0x, latency_s=0.01, contention=1.2, shared_bytes_s=1e9, "
        "sizes=1024MB,2048MB or profile=FILE",
        key="",
    ),
)


@verb(
    "funcpipe optimize profile.json --global-batch 64 --time-value 3.84 -o plan.json",
    PROFILE,
    _GOAL,
    _TRAINING,
    _PINS,
    group("platform", planned_platform()),
    _SEARCH,
    group(
        "output",
        option("-o --output FILE", "where to write the plan", None, "plan.json", key="plan.file", writes="plan"),
        option("--report FILE", "write the plan as an HTML page too (needs the extra `report`)", writes=""),
    ),
    common=(
        *("--global-batch", "--time-value", "--deadline", "--budget", "--platform", "--optimizer", "--numerics"),
        *("--replicas", "--max-functions", "--max-memory", "--pareto", "--output"),
    ),
    table="plan",
)
def optimize(options: Options) -> None:
    """Choose cuts, function sizes and replicas, and write the plan."""
    from funcpipe.partitioner.optimize import optimize as find_plan

    _check_combination(options)
    measured = read(ModelProfile, options.profile)
    spec, training, pins = platform_spec(options, measured), _training_spec(options), _pins(options)
    find = partial(find_plan, pins=pins, policy=options.policy, solver=options.solver, time_limit_s=options.time_limit)
    if options.what_if:
        _what_if(options, measured, spec, training, find)
    elif options.pareto:
        _pareto(options, measured, spec, training)
    else:
        if options.simulate:
            from funcpipe.analysis.improve import best_simulated

            limits = {"pins": pins, "time_limit_s": options.time_limit}
            plan = best_simulated(measured, spec, training, options.simulate, **limits)
        else:
            plan = find(measured, spec, training)
        write_file(partial(write, plan), options.output)
        if options.report:
            from funcpipe.show.material import Material
            from funcpipe.show.page import write_page

            write_file(partial(write_page, Material(plan=plan, profile=measured, spec=spec)), options.report)
        (observed,) = observed_here([plan])
        draws = partial(show.plan, plan, options.output), partial(show.observed, observed)
        show.show(options.json, with_observed(to_text(plan), observed), *draws)


def _check_combination(options: Options) -> None:
    by_itself = (options.policy, options.solver) == ("funcpipe", "auto")
    if options.figure and not options.pareto:
        raise InputError("--figure draws the plans that --pareto finds: give --pareto too, or leave --figure out")
    if options.pareto and not by_itself:
        raise InputError("--pareto searches by itself: it cannot be combined with --policy or --solver")
    if options.simulate and (options.pareto or options.what_if or not by_itself):
        raise InputError(
            "--simulate compares the plans of one search: leave out --pareto, --what-if, --policy, --solver"
        )
    if options.iterations > 1 and options.deadline is None and options.budget is None:
        raise InputError("--iterations is what --deadline or --budget are for: give one of them, or leave it out")
    if options.report and (options.pareto or options.what_if):
        raise InputError("--report shows one plan: leave out --pareto and --what-if")
    if options.what_if and options.pareto:
        raise InputError("--what-if compares two plans; it cannot be combined with --pareto")


def _what_if(
    options: Options, measured: ModelProfile, spec: PlatformSpec, training: TrainingSpec, find: "Planner"
) -> None:
    """Compare today's plan with the best one after the changes, and write that one."""
    from funcpipe.partitioner.alternatives import parse_changes, what_if

    start = "profile="
    paths = [item.removeprefix(start) for item in options.what_if if item.startswith(start)]
    changes = parse_changes([item for item in options.what_if if not item.startswith(start)])
    other = read(ModelProfile, paths[-1]) if paths else None
    found = what_if(measured, spec, training, changes, other_profile=other, find=find)
    write_file(partial(write, found.best), options.output)
    show.show(options.json, to_text(found), partial(show.what_if, found, options.output))


def _pareto(options: Options, measured: ModelProfile, spec: PlatformSpec, training: TrainingSpec) -> None:
    """Print every plan that no other beats in both time and money, and write the recommended one."""
    from funcpipe.partitioner.alternatives import pareto_front

    front = pareto_front(measured, spec, training, pins=_pins(options), time_limit_s=options.time_limit)
    if options.figure:
        from funcpipe.partitioner.alternatives import plot_front

        write_file(partial(plot_front, front), options.figure)
    write_file(partial(write, front.plans[front.recommended]), options.output)
    bare = replace(front, plans=tuple(replace(plan, request=None) for plan in front.plans))  # it is the same for all
    show.show(options.json, to_text(bare), partial(show.front, front, options.output))


def platform_spec(options: Options, measured: ModelProfile) -> PlatformSpec:
    """The platform that was named, or the profile's."""
    return load_spec(options.spec or options.platform or measured.platform)


def _training_spec(options: Options) -> TrainingSpec:
    """The training to plan for, with the goal; deadline and budget are those of one iteration."""
    return TrainingSpec(
        **{**fields_of(TrainingSpec, options), "time_value": options.time_value or 0.0},
        joint_loss=options.coupled is Coupled.CACHE,
        deadline_s=None if options.deadline is None else options.deadline / options.iterations,
        budget_usd=None if options.budget is None else options.budget / options.iterations,
    )


def _pins(options: Options) -> "Pins":
    """The decisions that the plan must follow."""
    from funcpipe.core import Pins

    sizes = {}
    for text in options.size:
        layer, equals, size = text.partition("=")
        if not equals:
            raise InputError(f"--size takes LAYER=SIZE, got {text!r}")
        sizes[layer] = size
    together = tuple(tuple(layers.split(",")) for layers in options.together)
    given = {name: value for name, value in fields_of(Pins, options).items() if name != "replicas"}
    return Pins(**{**given, "together": together, "sizes": sizes})


_PLAN = argument("PLAN", "plan written by `funcpipe optimize`", "plan", key="plan.file", reads=True)
_MADE_FROM = (option("--profile FILE", "take this profile", reads=True), *planned_platform(from_file=False))
_KNOWN = "plan: A plan knows the profile and the platform that it was made from, unless it was written by hand."


@verb("funcpipe explain plan.json", _PLAN, group(_KNOWN, *_MADE_FROM))
def explain(options: Options) -> None:
    """Explain a plan."""
    from funcpipe.partitioner.explain import explain as explain_plan
    from funcpipe.partitioner.explain import render as as_text

    plan = read(Plan, options.plan)
    source = _made_from(options, plan)
    found = explain_plan(plan, source.profile, source.spec, _made_for(plan), pins=source.pins)
    show.show(options.json, show.as_json(to_plain(found)), lambda: as_text(found).rstrip("\n"))


@verb(
    "funcpipe simulate plan.json --trace predicted.json",
    _PLAN,
    group(_KNOWN, *_MADE_FROM, option("--clip-grad-norm", "the run will clip the norm of the gradient")),
    group(
        "disturbances",
        option("--compute-jitter SHARE", "spread of compute times, 0.1 for 10%", not_negative, 0.0),
        option("--transfer-jitter SHARE", "spread of transfer times, 0.1 for 10%", not_negative, 0.0),
        option("--seed N", "seed of the jitter", whole(0), 0),
        option("--cold", "start every function cold"),
        option("--straggler sN.rN=FACTOR ...", "slow a worker down by this factor, as in s0.r1=3; may be repeated"),
        option(
            "--death sN.rN@SECONDS ...",
            "kill a worker at this time, as in s0.r1@2.5; it starts again and repeats the step. May be repeated",
        ),
    ),
    group(
        "output",
        option("--trace FILE", "write the events, for `funcpipe report` and Perfetto", writes="trace"),
        option("--gantt", "draw every lane over time"),
    ),
)
def simulate(options: Options) -> None:
    """Run one iteration of a plan on a virtual clock."""
    from funcpipe.analysis.predict import mean_step_s, predict

    plan = read(Plan, options.plan)
    source = _made_from(options, plan)
    disturbances = _disturbances(options, source.spec)
    how = {"disturbances": disturbances, "clipped": options.clip_grad_norm}
    trace = predict(plan, source.profile, source.spec, **how)
    mean_s = mean_step_s(plan, source.profile, source.spec, met_s=trace.end_s, **how)
    if options.trace:
        write_file(partial(write_trace, trace), options.trace)
    summary = {"iteration_s": mean_s, "tasks": len(trace.events), "trace": options.trace}
    summary |= {"meeting_s": trace.end_s} if plan.trains_locally else {}
    draw = partial(show.simulation, trace, plan, gantt=options.gantt, mean_s=mean_s)
    show.show(options.json, show.as_json(summary), draw)


def _made_from(options: Options, plan: Plan) -> PlanRequest:
    """The request of `plan`, with the changes of the options."""
    request = plan.request
    if request is None and options.profile is None:
        raise InputError(
            f"{options.plan} does not say what it was chosen from, as plans by hand and of earlier versions: "
            "name the profile with --profile FILE"
        )
    if request is None or options.profile is not None:
        profile = read(ModelProfile, options.profile)
        if request is None or request.profile.platform != profile.platform:
            return PlanRequest(profile=profile, spec=platform_spec(options, profile))
        request = replace(request, profile=profile)
    if options.spec or options.platform:
        request = replace(request, spec=platform_spec(options, request.profile))
    return request


def _made_for(plan: Plan) -> TrainingSpec:
    """The training that `plan` was made for; without a request, as far as the plan has it."""
    return plan.made_for or TrainingSpec(**plan.base_fields)


def _disturbances(options: Options, spec: PlatformSpec) -> "Disturbances":
    """The disturbances of the simulated step."""
    from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure

    deaths = [_of_worker("--death", text, "@") for text in options.death]
    return Disturbances(
        **fields_of(Disturbances, options),
        cold_start_s=spec.cold_start_s if options.cold else 0.0,
        stragglers=dict(_of_worker("--straggler", text, "=") for text in options.straggler),
        failures=tuple(Failure(worker=who, at_s=at_s, restart_s=spec.cold_start_s) for who, at_s in deaths),
    )


def _of_worker(option: str, text: str, sign: str) -> "tuple[Worker, float]":
    match = re.fullmatch(rf"s(\d+)\.r(\d+){sign}(\d+(?:\.\d*)?)", text, re.ASCII)
    if match is None:
        raise InputError(f"{option} takes a worker and a number, as in s0.r1{sign}2.5, got {text!r}")
    return (int(match[1]), int(match[2])), float(match[3])
