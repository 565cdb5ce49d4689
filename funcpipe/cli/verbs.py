"""What each verb does; it imports what it needs itself, so that planning loads neither torch nor a cloud library."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe.cli import render
from funcpipe.cli.factories import load_factory
from funcpipe.cli.files import write_file
from funcpipe.cli.functions import measure_platform, open_named_site
from funcpipe.cli.training import faults_of, limits_of, pipe_of, settings_of
from funcpipe.core import (
    ModelProfile,
    OptimizerKind,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Sync,
    TrainingSpec,
    Wire,
    read,
    read_trace,
    to_text,
    write,
    write_side_by_side,
    write_trace,
)
from funcpipe.core.json_form import to_plain
from funcpipe.errors import Disagreement, InputError
from funcpipe.platforms.catalog import load_spec, spec_names

if TYPE_CHECKING:
    import torch

    from funcpipe.partitioner.analysis.whatif import Planner
    from funcpipe.partitioner.problem.pins import Pins


def profile(options: argparse.Namespace) -> None:
    """Measure a model's layers and write the profile."""
    from funcpipe.api import FuncPipe

    pipe = FuncPipe(load_factory(options.model)(), loss_fn=_no_loss, optimizer=_no_optimizer, name=options.model)
    sample = load_factory(options.sample)()
    with open_named_site(options.on, options) as site, render.profiling() as progress:
        measured = pipe.profile(
            sample,
            platform=load_spec(options.spec or options.platform),
            micro_batch=options.micro_batch,
            repeats=options.repeats,
            layers=options.layers,
            on=site,
            max_usd=options.max_usd,
            progress=progress,
        )
    _write(measured, options.output)
    render.show(options.json, to_text(measured), partial(render.profile, measured, options.output))


def optimize(options: argparse.Namespace) -> None:
    """Choose cuts, function sizes and replicas, and write the plan."""
    from funcpipe.partitioner.optimize import optimize as plan_by

    measured = read(ModelProfile, options.profile)
    spec, training = _spec(options, measured), _training(options, options.global_batch)
    find = partial(
        plan_by, pins=_pins(options), policy=options.policy, solver=options.solver, time_limit_s=options.time_limit
    )
    if options.what_if:
        _what_if(options, measured, spec, training, find)
    elif options.pareto:
        _pareto(options, measured, spec, training)
    else:
        plan = find(measured, spec, training)
        _write(plan, options.output)
        render.show(options.json, to_text(plan), partial(render.plan, plan, options.output))


def _what_if(
    options: argparse.Namespace, measured: ModelProfile, spec: PlatformSpec, training: TrainingSpec, find: "Planner"
) -> None:
    """The plan as things are beside the best one after the changes, which is written."""
    from funcpipe.partitioner.analysis.whatif import parse_changes, what_if

    if options.pareto:
        raise InputError("--what-if compares two plans; it cannot be combined with --pareto")
    start = "profile="
    paths = [item.removeprefix(start) for item in options.what_if if item.startswith(start)]
    changes = parse_changes([item for item in options.what_if if not item.startswith(start)])
    other = read(ModelProfile, paths[-1]) if paths else None
    found = what_if(measured, spec, training, changes, other_profile=other, find=find)
    _write(found.best, options.output)
    render.show(options.json, to_text(found), partial(render.what_if, found, options.output))


def _pareto(options: argparse.Namespace, measured: ModelProfile, spec: PlatformSpec, training: TrainingSpec) -> None:
    """All plans that none beats both in time and in money; the recommended one is written."""
    from funcpipe.partitioner.analysis.front import pareto_front

    front = pareto_front(measured, spec, training, pins=_pins(options), time_limit_s=options.time_limit)
    if options.figure:
        from funcpipe.partitioner.analysis.plot import plot_front

        write_file(partial(plot_front, front), options.figure)
    _write(front.plans[front.recommended], options.output)
    render.show(options.json, to_text(front), partial(render.front, front, options.output))


def explain(options: argparse.Namespace) -> None:
    """Say why a plan is as it is."""
    from funcpipe.partitioner.analysis.explain import explain as explain_plan
    from funcpipe.partitioner.analysis.explain_text import render as as_text

    plan, measured = read(Plan, options.plan), read(ModelProfile, options.profile)
    training = _training(options, plan.global_batch)
    found = explain_plan(plan, measured, _spec(options, measured), training, pins=_pins(options))
    render.show(options.json, render.as_json(to_plain(found)), lambda console: console.print(as_text(found), end=""))


def simulate(options: argparse.Namespace) -> None:
    """Play one iteration of a plan on a virtual clock."""
    from funcpipe.cli.disturbances import disturbances
    from funcpipe.report.predict import predict

    plan, measured = read(Plan, options.plan), read(ModelProfile, options.profile)
    spec = _spec(options, measured)
    trace = predict(plan, measured, spec, disturbances=disturbances(options, spec), clipped=options.clip_grad_norm)
    if options.trace:
        write_file(partial(write_trace, trace), options.trace)
    summary = {"iteration_s": trace.end_s, "tasks": len(trace.events), "trace": options.trace}
    render.show(options.json, render.as_json(summary), partial(render.simulation, trace, plan, gantt=options.gantt))


def train(options: argparse.Namespace) -> None:
    """Train a model over functions by a plan."""
    import torch

    plan, pipe = pipe_of(options)
    given: dict[str, Any] = {
        "epochs": options.epochs,
        "platform": options.platform,
        "like": options.like,
        "plan": plan,
        "seed": options.seed,
        "faults": faults_of(options),
        "limits": limits_of(options),
        "settings": settings_of(options),
    }
    if options.detach:
        run = pipe.start(load_factory(options.data), **given)
        render.show(options.json, render.as_json({"run": run}), partial(render.detached, run, options.storage))
        return
    with render.training(quiet=options.json) as on_progress:
        result = pipe.train(load_factory(options.data), **given, on_progress=on_progress)
    if options.trace:
        write_file(partial(write_trace, result.trace), options.trace)
    if options.output:
        write_file(partial(torch.save, result.state_dict()), options.output)
    summary = {"run": result.run, "losses": result.losses, "cost_usd": result.bill.cost_usd, "trace": options.trace}
    render.show(options.json, render.as_json(summary), partial(render.training_result, result, options))


def verify(options: argparse.Namespace) -> None:
    """Train a few steps over functions and in one process, and compare."""
    plan, pipe = pipe_of(options)
    found = pipe.verify(
        load_factory(options.data),
        steps=options.steps,
        plan=plan,
        seed=options.seed,
        tolerance=options.tolerance,
        message_deadline_s=options.message_deadline,
    )
    render.show(options.json, to_text(found), partial(render.verification, found))
    if found.first_difference is not None:
        raise Disagreement(
            f"the first layer where they part is {found.first_difference.layer}: {found.first_difference.name} differs "
            f"by {found.first_difference.difference:.2e}, more than {found.tolerance:g}"
        )


def report(options: argparse.Namespace) -> None:
    """Set observed beside predicted."""
    from funcpipe.report.compare import compare, typical_step
    from funcpipe.report.gantt import draw

    predicted, observed = read_trace(options.predicted), read_trace(options.observed)
    comparison = compare(predicted, observed)
    step = typical_step(observed)
    if options.figure:
        write_file(partial(draw, predicted, step), options.figure)
    if options.perfetto:
        write_file(partial(write_side_by_side, predicted, step), options.perfetto)
    render.show(options.json, to_text(comparison), partial(render.comparison, comparison, options.observed))


def platforms(options: argparse.Namespace) -> None:
    """List, show or measure platform specifications."""
    if options.action == "list":
        specs = [load_spec(name) for name in spec_names()]
        render.show(options.json, render.as_json([spec.name for spec in specs]), partial(render.platforms, specs))
        return
    if options.action == "measure":
        measure_platform(options)
        return
    if options.name is None:
        raise InputError(f"say which platform to show: {', '.join(spec_names())}")
    spec = load_spec(options.name)
    render.show(options.json, to_text(spec), partial(render.platform, spec))


def _spec(options: argparse.Namespace, measured: ModelProfile) -> PlatformSpec:
    return load_spec(options.spec or options.platform or measured.platform)


def _training(options: argparse.Namespace, global_batch: int) -> TrainingSpec:
    if options.iterations < 1:
        raise InputError(f"--iterations must be at least 1, got {options.iterations}")
    return TrainingSpec(
        global_batch=global_batch,
        optimizer=OptimizerKind(options.optimizer),
        wire=Wire(options.wire),
        recompute=Recompute(options.recompute),
        wire_back=None if options.wire_back == "same" else Wire(options.wire_back),
        schedule=None if options.schedule == "auto" else ScheduleKind(options.schedule),
        sync=None if options.sync == "auto" else Sync(options.sync),
        shard_optimizer=options.shard_optimizer,
        replicas=_numbers("--replicas", options.replicas),
        time_value=options.time_value,
        deadline_s=None if options.deadline is None else options.deadline / options.iterations,
        budget_usd=None if options.budget is None else options.budget / options.iterations,
    )


def _pins(options: argparse.Namespace) -> "Pins":
    from funcpipe.partitioner.problem.pins import Pins

    sizes = {}
    for text in options.size:
        layer, equals, size = text.partition("=")
        if not equals:
            raise InputError(f"--size takes LAYER=SIZE, got {text!r}")
        sizes[layer] = size
    return Pins(
        cuts=tuple(options.cut),
        together=tuple(tuple(group.split(",")) for group in options.together),
        sizes=sizes,
        memory_mb=options.memory,
        max_memory_mb=options.max_memory,
        max_functions=options.max_functions,
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} takes whole numbers separated by commas, got {text!r}") from None


def _write(value: "ModelProfile | Plan", path: str) -> None:
    write_file(partial(write, value), path)


def _no_loss(output: Any, target: Any) -> "torch.Tensor":
    raise InputError("profiling on the command line measures the model without its loss")


def _no_optimizer(parameters: Any) -> "torch.optim.Optimizer":
    raise InputError("profiling needs no optimiser")
