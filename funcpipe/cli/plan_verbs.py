"""The verbs profile, optimize, explain and simulate.

Each imports what it needs itself, so that planning loads neither torch nor a cloud library.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show as render
from funcpipe.cli import plan_values
from funcpipe.cli.factories import check_names, load_data, make_model, make_sample
from funcpipe.cli.files import write_file
from funcpipe.cli.history_verbs import observed_here, with_observed
from funcpipe.cli.platform_verbs import check_site, open_named_site
from funcpipe.cli.train_values import teachers_of
from funcpipe.core import ModelProfile, Plan, PlatformSpec, TrainingSpec, read, to_text, write, write_trace
from funcpipe.core.json_form import to_plain
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from funcpipe.neighbours.history.learned import ObservedIteration
    from funcpipe.partitioner.alternatives import Planner


def profile(options: argparse.Namespace) -> None:
    """Measure the layers of a model and write the profile."""
    check_names({"the model": options.model, "--sample": options.sample})
    spec = load_spec(options.spec or options.platform)
    like = load_spec(options.like) if options.like else None
    check_site(options.on, options)
    from funcpipe.api import FuncPipe

    model = make_model(options.model)
    pipe = FuncPipe(
        model,
        loss_fn=_no_loss,
        optimizer=_no_optimizer,
        precision=options.precision,
        name=options.model,
        blocks=options.blocks,
        teachers=teachers_of(options.teachers),
    )
    sample = make_sample(options.sample)
    with open_named_site(options.on, like) as site, render.profiling(quiet=options.quiet) as progress:
        measured = pipe.profile(
            sample,
            platform=spec,
            micro_batch=options.micro_batch,
            repeats=options.repeats,
            layers=options.layers,
            dataset=None if options.data is None else load_data(options.data),
            on=site,
            max_usd=options.max_usd,
            progress=progress,
        )
    write_file(partial(write, measured), options.output)
    render.show(options.json, to_text(measured), partial(render.profile, measured, options.output))


def optimize(options: argparse.Namespace) -> None:
    """Choose cuts, function sizes and replicas, and write the plan."""
    from funcpipe.partitioner.optimize import optimize as find_plan

    if options.figure and not options.pareto:
        raise InputError("--figure draws the plans that --pareto finds: give --pareto too, or leave --figure out")
    if options.pareto and (options.policy, options.solver) != ("funcpipe", "auto"):
        raise InputError("--pareto searches by itself: it cannot be combined with --policy or --solver")
    if options.simulate and (
        options.pareto or options.what_if or options.policy != "funcpipe" or options.solver != "auto"
    ):
        raise InputError(
            "--simulate compares the plans of one search: leave out --pareto, --what-if, --policy, --solver"
        )
    if options.iterations > 1 and options.deadline is None and options.budget is None:
        raise InputError("--iterations is what --deadline or --budget are for: give one of them, or leave it out")
    if options.report and (options.pareto or options.what_if):
        raise InputError("--report shows one plan: leave out --pareto and --what-if")
    measured = read(ModelProfile, options.profile)
    spec = plan_values.platform_spec(options, measured)
    training = plan_values.training_spec(options, options.global_batch)
    find = partial(
        find_plan,
        pins=plan_values.pins(options),
        policy=options.policy,
        solver=options.solver,
        time_limit_s=options.time_limit,
    )
    if options.what_if:
        _what_if(options, measured, spec, training, find)
    elif options.pareto:
        _pareto(options, measured, spec, training)
    else:
        if options.simulate:
            from funcpipe.analysis.improve import best_simulated

            limits = {"pins": plan_values.pins(options), "time_limit_s": options.time_limit}
            plan = best_simulated(measured, spec, training, options.simulate, **limits)
        else:
            plan = find(measured, spec, training)
        write_file(partial(write, plan), options.output)
        if options.report:
            from funcpipe.show.material import Material
            from funcpipe.show.page import write_page

            write_file(partial(write_page, Material(plan=plan, profile=measured, spec=spec)), options.report)
        (observed,) = observed_here([plan])
        draw = partial(_planned, plan, options.output, observed)
        render.show(options.json, with_observed(to_text(plan), observed), draw)


def _planned(plan: Plan, path: str, observed: "Sequence[ObservedIteration]", console: "Console") -> None:
    """The plan as modelled, and an iteration as observed here."""
    render.plan(plan, path, console)
    render.observed(observed, console)


def _what_if(
    options: argparse.Namespace, measured: ModelProfile, spec: PlatformSpec, training: TrainingSpec, find: "Planner"
) -> None:
    """Compare today's plan with the best one after the changes, and write that one."""
    from funcpipe.partitioner.alternatives import parse_changes, what_if

    if options.pareto:
        raise InputError("--what-if compares two plans; it cannot be combined with --pareto")
    start = "profile="
    paths = [item.removeprefix(start) for item in options.what_if if item.startswith(start)]
    changes = parse_changes([item for item in options.what_if if not item.startswith(start)])
    other = read(ModelProfile, paths[-1]) if paths else None
    found = what_if(measured, spec, training, changes, other_profile=other, find=find)
    write_file(partial(write, found.best), options.output)
    render.show(options.json, to_text(found), partial(render.what_if, found, options.output))


def _pareto(options: argparse.Namespace, measured: ModelProfile, spec: PlatformSpec, training: TrainingSpec) -> None:
    """Print every plan that no other beats in both time and money, and write the recommended one."""
    from funcpipe.partitioner.alternatives import pareto_front

    front = pareto_front(measured, spec, training, pins=plan_values.pins(options), time_limit_s=options.time_limit)
    if options.figure:
        from funcpipe.partitioner.alternatives import plot_front

        write_file(partial(plot_front, front), options.figure)
    write_file(partial(write, front.plans[front.recommended]), options.output)
    bare = replace(front, plans=tuple(replace(plan, request=None) for plan in front.plans))  # it is the same for all
    render.show(options.json, to_text(bare), partial(render.front, front, options.output))


def explain(options: argparse.Namespace) -> None:
    """Explain a plan."""
    from funcpipe.partitioner.explain import explain as explain_plan
    from funcpipe.partitioner.explain import render as as_text

    plan = read(Plan, options.plan)
    source = plan_values.made_from(options, plan)
    found = explain_plan(plan, source.profile, source.spec, plan_values.explained_spec(plan), pins=source.pins)
    render.show(options.json, render.as_json(to_plain(found)), lambda console: console.print(as_text(found), end=""))


def simulate(options: argparse.Namespace) -> None:
    """Run one iteration of a plan on a virtual clock."""
    from funcpipe.analysis.predict import predict

    plan = read(Plan, options.plan)
    source = plan_values.made_from(options, plan)
    disturbances = plan_values.disturbances(options, source.spec)
    trace = predict(plan, source.profile, source.spec, disturbances=disturbances, clipped=options.clip_grad_norm)
    if options.trace:
        write_file(partial(write_trace, trace), options.trace)
    summary = {"iteration_s": trace.end_s, "tasks": len(trace.events), "trace": options.trace}
    render.show(options.json, render.as_json(summary), partial(render.simulation, trace, plan, gantt=options.gantt))


def _no_loss(output: Any, target: Any) -> "torch.Tensor":
    """The sum of all outputs, which stands for the loss: its gradients are those that a profile without one takes."""
    from torch import Tensor

    from funcpipe.model.tensors import flatten

    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf.sum() for leaf in leaves[1:]), leaves[0].sum())


def _no_optimizer(parameters: Any) -> "torch.optim.Optimizer":
    """The optimiser of a profile, which takes no step."""
    import torch

    return torch.optim.SGD(parameters, lr=0.0)
