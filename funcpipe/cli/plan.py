"""The verbs optimize, explain and simulate.

Each imports what it needs itself, so that planning loads neither torch nor a cloud library.
"""

import os
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from funcpipe import show
from funcpipe.cli.files import write_file
from funcpipe.cli.measure import PROFILE, planned_platform
from funcpipe.cli.options import argument, group, not_negative, option, setting, whole
from funcpipe.cli.plan_options import GOAL, PINS, SEARCH, TRAINING
from funcpipe.cli.report import observed_here, with_observed
from funcpipe.cli.verbs import Options, fields_of, verb
from funcpipe.core import (
    Coupled,
    ModelProfile,
    Plan,
    PlanRequest,
    PlatformSpec,
    TrainingSpec,
    read,
    to_text,
    write,
    write_trace,
)
from funcpipe.core.json_form import to_plain
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec, profiled_spec

if TYPE_CHECKING:
    from funcpipe.core import Pins
    from funcpipe.partitioner.alternatives import Planner
    from funcpipe.scheduler.simulator.disturbances import Disturbances, Worker


@verb(
    "funcpipe optimize profile.json --global-batch 64 --time-value 3.84 -o plan.json",
    PROFILE,
    GOAL,
    TRAINING,
    PINS,
    group("platform", planned_platform()),
    SEARCH,
    group(
        "output",
        option("-o --output FILE", "where to write the plan", None, "plan.json", key="plan.file", writes="plan"),
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
        (observed,) = observed_here([plan])
        draws = partial(show.plan, plan, options.output), partial(show.observed, observed)
        show.show(options.json, with_observed(to_text(plan), observed), *draws)


def _check_combination(options: Options) -> None:
    by_itself = (options.policy, options.solver) == ("funcpipe", "auto")
    if options.figure and not options.pareto:
        raise InputError("--figure draws the plans that --pareto finds: give --pareto too, or leave --figure out")
    if options.pareto and not by_itself:
        raise InputError("--pareto searches by itself: it cannot be combined with plan.policy or plan.solver")
    if options.simulate and (options.pareto or options.what_if or not by_itself):
        raise InputError(
            "plan.simulate compares the plans of one search: leave out --pareto, --what-if, plan.policy, plan.solver"
        )
    if options.iterations > 1 and options.deadline is None and options.budget is None:
        raise InputError("--steps is what --deadline or --max-usd are for: give one of them, or leave it out")
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
    named = options.spec or options.platform
    return load_spec(named) if named else profiled_spec(measured)


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
            raise InputError(f"plan.size takes LAYER=SIZE, got {text!r}")
        sizes[layer] = size
    together = tuple(tuple(layers.split(",")) for layers in options.together)
    given = {name: value for name, value in fields_of(Pins, options).items() if name != "replicas"}
    return Pins(**{**given, "together": together, "sizes": sizes})


_PLAN = (
    argument("PLAN", "plan written by `funcpipe optimize`", "plan", key="plan.file", reads=True),
    argument(
        "PROFILE|PLATFORM ...",
        "a profile or a platform, by name or file, to take instead of those that the plan was made from",
        "sources",
        needed=False,
        reads=True,
    ),
)


@verb("funcpipe explain plan.json\n  funcpipe explain plan.json aws-lambda?region=eu-central-1", *_PLAN)
def explain(options: Options) -> None:
    """Explain a plan."""
    from funcpipe.partitioner.explain import explain as explain_plan
    from funcpipe.partitioner.explain_text import render as as_text

    plan = read(Plan, options.plan)
    source = _made_from(options, plan)
    found = explain_plan(plan, source.profile, source.spec, _made_for(plan), pins=source.pins)
    show.show(options.json, show.as_json(to_plain(found)), lambda: as_text(found).rstrip("\n"))


@verb(
    "funcpipe simulate plan.json --trace predicted.json",
    *_PLAN,
    setting("simulation.clip-grad-norm", "the run will clip the norm of the gradient"),
    group(
        "disturbances",
        setting("simulation.compute-jitter SHARE", "spread of compute times, 0.1 for 10%", not_negative, 0.0),
        setting("simulation.transfer-jitter SHARE", "spread of transfer times, 0.1 for 10%", not_negative, 0.0),
        setting("simulation.seed N", "seed of the jitter", whole(0), 0),
        setting("simulation.cold", "start every function cold"),
        setting(
            "simulation.straggler sN.rN=FACTOR ...", "slow a worker down by this factor, as in s0.r1=3; may be repeated"
        ),
        setting(
            "simulation.death sN.rN@SECONDS ...",
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
    """The request of `plan`, with the profile and the platform that the command names."""
    profile, spec = _sources(options)
    request = plan.request
    if request is None and profile is None:
        raise InputError(
            f"{options.plan} does not say what it was chosen from, as plans by hand and of earlier versions: "
            "name the profile after it"
        )
    if request is None or profile is not None:
        assert profile is not None, "the request has one otherwise"
        if request is None or request.profile.platform != profile.platform:
            return PlanRequest(profile=profile, spec=spec or profiled_spec(profile))
        request = replace(request, profile=profile)
    return request if spec is None else replace(request, spec=spec)


def _sources(options: Options) -> tuple[ModelProfile | None, PlatformSpec | None]:
    """The profile and the platform that the command names after the plan, if it does."""
    from funcpipe.show.material import document_format

    profile: ModelProfile | None = None
    spec: PlatformSpec | None = None
    for text in options.sources:
        is_profile = os.path.exists(text) and document_format(text) == ModelProfile.FORMAT
        if (profile if is_profile else spec) is not None:
            raise InputError(f"{text} is a second {'profile' if is_profile else 'platform'}: name one")
        if is_profile:
            profile = read(ModelProfile, text)
        else:
            spec = load_spec(text)
    return profile, spec


def _made_for(plan: Plan) -> TrainingSpec:
    """The training that `plan` was made for; without a request, as far as the plan has it."""
    return plan.made_for or TrainingSpec(**plan.base_fields)


def _disturbances(options: Options, spec: PlatformSpec) -> "Disturbances":
    """The disturbances of the simulated step."""
    from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure

    deaths = [_of_worker("simulation.death", text, "@") for text in options.death]
    return Disturbances(
        **fields_of(Disturbances, options),
        cold_start_s=spec.cold_start_s if options.cold else 0.0,
        stragglers=dict(_of_worker("simulation.straggler", text, "=") for text in options.straggler),
        failures=tuple(Failure(worker=who, at_s=at_s, restart_s=spec.cold_start_s) for who, at_s in deaths),
    )


def _of_worker(option: str, text: str, sign: str) -> "tuple[Worker, float]":
    match = re.fullmatch(rf"s(\d+)\.r(\d+){sign}(\d+(?:\.\d*)?)", text, re.ASCII)
    if match is None:
        raise InputError(f"{option} takes a worker and a number, as in s0.r1{sign}2.5, got {text!r}")
    return (int(match[1]), int(match[2])), float(match[3])
