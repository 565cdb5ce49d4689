"""The options of profile, optimize, explain and simulate."""

import argparse
from typing import Any

from funcpipe.cli.numbers import not_negative, positive, whole
from funcpipe.cli.options import (
    FACTORY,
    add_blocks,
    add_choice,
    add_measuring,
    add_model,
    add_platform,
    add_precision,
    add_teachers,
    add_verb,
)
from funcpipe.core import SYNC_WIRES, Coupled, Numerics, OptimizerKind, Recompute, ScheduleKind, Sync, Wire
from funcpipe.partitioner import PROFILED_LAYERS


def add_profile(verbs: Any) -> None:
    """`funcpipe profile`."""
    verb = add_verb(
        verbs,
        "profile",
        "measure the layers of a model",
        "funcpipe profile funcpipe.examples.spirals:model --sample funcpipe.examples.spirals:sample \\\n"
        "    --micro-batch 16 --platform local -o profile.json",
        module="plan_verbs",
    )
    add_model(verb)
    model = verb.add_argument_group("model")
    model.add_argument(
        "--sample",
        metavar=FACTORY,
        required=True,
        help="factory that returns one micro-batch of inputs: a tuple, or a dict of named arguments; or a DataLoader "
        "whose collate_fn makes micro-batches",
    )
    model.add_argument(
        "--data",
        metavar=FACTORY,
        help="factory that returns the dataset to train on, or its URL: loading is measured too",
    )
    model.add_argument("--micro-batch", type=whole(), default=4, metavar="N", help="samples per micro-batch")
    model.add_argument("--repeats", type=whole(), default=5, metavar="N", help="how many times to time each layer")
    model.add_argument(
        "--layers", type=whole(), default=PROFILED_LAYERS, metavar="N", help="fold light layers until N are left"
    )
    add_blocks(model)
    add_teachers(model)
    add_precision(model, default="fp32")
    platform = verb.add_argument_group("platform")
    add_platform(platform, default="aws-lambda")
    platform.add_argument(
        "--on",
        metavar="PLATFORM",
        help="time the layers in functions of every size: `local`, or a deployment's URL "
        "(default: time them in this process and scale to the platform's sizes)",
    )
    add_measuring(platform)
    _add_output(verb, "profile.json", "the profile")


def add_optimize(verbs: Any) -> None:
    """`funcpipe optimize`."""
    verb = add_verb(
        verbs,
        "optimize",
        "choose cuts, function sizes and replicas",
        "funcpipe optimize profile.json --global-batch 64 --time-value 3.84 -o plan.json",
        module="plan_verbs",
        common=(
            *("--global-batch", "--time-value", "--deadline", "--budget", "--platform", "--optimizer", "--numerics"),
            *("--replicas", "--max-functions", "--max-memory", "--pareto", "--output"),
        ),
    )
    verb.add_argument("profile", metavar="PROFILE", help="profile to plan from, written by `funcpipe profile`")
    _add_goal(verb)
    _add_choices(verb).add_argument(
        "--global-batch", type=whole(), required=True, metavar="N", help="samples per iteration, over all replicas"
    )
    _add_pins(verb)
    add_platform(verb.add_argument_group("platform"), default=None)
    search = verb.add_argument_group("search")
    search.add_argument(
        "--solver",
        default="auto",
        metavar="NAME",
        help="`exact` for the built-in search with proof, or a solver: gurobi, scip, highs, "
        "or mip for the first of these that is installed; `paper` for the paper's own program; `auto` is exact",
    )
    search.add_argument("--time-limit", type=positive, metavar="SECONDS", help="stop searching after this time")
    search.add_argument(
        "--simulate",
        type=whole(),
        metavar="N",
        help="simulate an iteration of the best N plans that differ in cuts, replicas or schedule, and take the best",
    )
    search.add_argument(
        "--policy",
        default="funcpipe",
        metavar="NAME",
        help="plan by the rules of another system, such as pipedream or lambdaml; see docs/planning.md",
    )
    search.add_argument(
        "--pareto", action="store_true", help="print every plan that no other beats in both time and money"
    )
    search.add_argument("--figure", metavar="FILE", help="with --pareto: draw those plans (needs matplotlib)")
    search.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="compare today's plan with the best one after a change, and write that one. May be repeated. "
        "bandwidth=2x, price=0.5x, request_price=0x, latency_s=0.01, contention=1.2, shared_bytes_s=1e9, "
        "sizes=1024MB,2048MB or profile=FILE",
    )
    _add_output(verb, "plan.json", "the plan").add_argument(
        "--report", metavar="FILE", help="write the plan as an HTML page too (needs the extra `report`)"
    )


def add_explain(verbs: Any) -> None:
    """`funcpipe explain`."""
    verb = add_verb(
        verbs,
        "explain",
        "say why a plan is the way it is",
        "funcpipe explain plan.json",
        module="plan_verbs",
    )
    _add_plan(verb)


def add_simulate(verbs: Any) -> None:
    """`funcpipe simulate`."""
    verb = add_verb(
        verbs,
        "simulate",
        "run one iteration of a plan on a virtual clock",
        "funcpipe simulate plan.json --trace predicted.json",
        module="plan_verbs",
    )
    plan = _add_plan(verb)
    plan.add_argument("--clip-grad-norm", action="store_true", help="the run will clip the norm of the gradient")
    _add_disturbances(verb)
    output = verb.add_argument_group("output")
    output.add_argument("--trace", metavar="FILE", help="write the events, for `funcpipe report` and Perfetto")
    output.add_argument("--gantt", action="store_true", help="draw every lane over time")


def _add_plan(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    verb.add_argument("plan", metavar="PLAN", help="plan written by `funcpipe optimize`")
    group = verb.add_argument_group(
        "plan", "A plan knows the profile and the platform that it was made from, unless it was written by hand."
    )
    group.add_argument("--profile", metavar="FILE", help="take this profile")
    add_platform(group, default=None)
    return group


def _add_goal(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("goal", "The cheapest iteration, unless one of the first three says otherwise.")
    goal = group.add_mutually_exclusive_group()
    goal.add_argument(
        "--time-value", type=not_negative, default=0.0, metavar="USD_PER_HOUR", help="what saving an hour is worth"
    )
    goal.add_argument("--deadline", type=positive, metavar="SECONDS", help="the cheapest iteration within this time")
    goal.add_argument("--budget", type=positive, metavar="USD", help="the fastest iteration within this budget")
    group.add_argument(
        "--iterations", type=whole(), default=1, metavar="N", help="--deadline and --budget cover N iterations together"
    )


def _add_choices(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of training; `auto` leaves the choice to the planner."""
    group = verb.add_argument_group("training")
    add_choice(
        group, "--optimizer", [kind.value for kind in OptimizerKind], "sgd", "optimiser, by the state that it keeps"
    )
    add_choice(group, "--wire", [wire.value for wire in Wire], "fp32", "number format in which activations travel")
    add_choice(
        group,
        "--wire-back",
        ["same", *(wire.value for wire in Wire)],
        "same",
        "number format of their gradients",
    )
    add_choice(
        group,
        "--wire-sync",
        [wire.value for wire in SYNC_WIRES],
        "fp32",
        "number format in which replicas sum gradients",
    )
    add_choice(
        group,
        "--numerics",
        [kind.value for kind in Numerics],
        "exact",
        "may what would travel in fp32 travel in bf16, or in int8, where that is better",
    )
    add_choice(
        group,
        "--recompute",
        [kind.value for kind in Recompute],
        "auto",
        "may stages recompute to save memory",
    )
    add_choice(
        group, "--schedule", ["auto", *(kind.value for kind in ScheduleKind)], "auto", "order of the micro-batches"
    )
    add_choice(group, "--sync", ["auto", *(way.value for way in Sync)], "auto", "how replicas sum their gradients")
    _add_places(group)
    return group


def _add_places(group: argparse._ArgumentGroup) -> None:
    """Add the options for where state and messages lie, and for what they leave room."""
    group.add_argument(
        "--shard-optimizer", action="store_true", help="divide the optimiser's state among replicas (ZeRO stage 1)"
    )
    group.add_argument(
        "--stores",
        default="default",
        metavar="KIND=STORE",
        help="which stores of the platform the plan may use: `default` alone, `auto` for whichever are best, or by "
        "kind, such as messages=express,sums=auto",
    )
    group.add_argument(
        "--averaged", action="store_true", help="leave room for an average of the parameters (train --ema)"
    )
    group.add_argument(
        "--coupled",
        choices=[kind.value for kind in Coupled],
        help="`cache` plans for a loss that is computed once for the whole global batch, from the outputs of all "
        "micro-batches (train --coupled cache); the others do not change a plan",
    )
    group.add_argument(
        "--replicas", metavar="N,N", help="degrees of data parallelism to consider (default: all that divide the batch)"
    )


def _add_pins(verb: argparse.ArgumentParser) -> None:
    pins = verb.add_argument_group("pins", "Decisions that the plan must follow. The first three may be repeated.")
    pins.add_argument("--cut", action="append", default=[], metavar="LAYER", help="begin a stage with this layer")
    pins.add_argument(
        "--together",
        action="append",
        default=[],
        metavar="LAYER,LAYER",
        help="keep these layers, and all between them, in one stage",
    )
    pins.add_argument(
        "--size", action="append", default=[], metavar="LAYER=SIZE", help="run this layer on functions of this size"
    )
    pins.add_argument("--memory", type=whole(), metavar="MB", help="give every function this much memory")
    pins.add_argument("--max-memory", type=whole(), metavar="MB", help="give no function more memory than this")
    pins.add_argument("--max-functions", type=whole(), metavar="N", help="run no more functions than this at once")


def _add_disturbances(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("disturbances")
    group.add_argument(
        "--compute-jitter",
        type=not_negative,
        default=0.0,
        metavar="SHARE",
        help="spread of compute times, 0.1 for 10%%",
    )
    group.add_argument(
        "--transfer-jitter",
        type=not_negative,
        default=0.0,
        metavar="SHARE",
        help="spread of transfer times, 0.1 for 10%%",
    )
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of the jitter")
    group.add_argument("--cold", action="store_true", help="start every function cold")
    group.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="sN.rN=FACTOR",
        help="slow a worker down by this factor, as in s0.r1=3; may be repeated",
    )
    group.add_argument(
        "--death",
        action="append",
        default=[],
        metavar="sN.rN@SECONDS",
        help="kill a worker at this time, as in s0.r1@2.5; it starts again and repeats the step. May be repeated",
    )


def _add_output(verb: argparse.ArgumentParser, default: str, what: str) -> argparse._ArgumentGroup:
    group = verb.add_argument_group("output")
    group.add_argument("-o", "--output", metavar="FILE", default=default, help=f"where to write {what}")
    return group
