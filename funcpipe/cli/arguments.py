"""What can be said on the command line."""

import argparse
from typing import Any

from funcpipe.cli.deploy_arguments import add_deploy, add_destroy, add_logs
from funcpipe.cli.life_arguments import add_clean, add_life, add_status, add_stop
from funcpipe.cli.parts import add_choice, add_verb
from funcpipe.core import OptimizerKind, Recompute, ScheduleKind, Sync, Wire
from funcpipe.partitioner.catalog import PROFILED_LAYERS, solvers

_FACTORY = "MODULE:FACTORY"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; `run` of what it returns is the function to call with it."""
    parser = argparse.ArgumentParser(
        prog="funcpipe",
        description="Train PyTorch models on serverless functions: profile, optimize, simulate, train, report.",
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for add in (
        *(_profile, _optimize, _explain, _simulate, _train, _verify),
        *(add_status, add_stop, add_clean, _report, _platforms),
        *(add_deploy, add_destroy, add_logs),
    ):
        add(verbs)
    return parser


def _profile(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "profile",
        "measure a model's layers",
        "funcpipe profile experiments.models.digits:model --sample experiments.models.digits:sample "
        "--micro-batch 16 --platform local -o profile.json",
    )
    verb.add_argument("model", metavar=_FACTORY, help="a function that makes the module")
    verb.add_argument(
        "--sample", metavar=_FACTORY, required=True, help="a function that makes the inputs: a tuple, or a dict by name"
    )
    verb.add_argument("--micro-batch", type=int, default=4, help="samples of a micro-batch (default: %(default)s)")
    verb.add_argument("--repeats", type=int, default=5, help="time each layer so many times (default: %(default)s)")
    _add_platform(verb, default="aws-lambda")
    verb.add_argument(
        "--layers",
        type=int,
        default=PROFILED_LAYERS,
        help="merge layers down to this many (default: %(default)s)",
    )
    verb.add_argument(
        "--on", metavar="NAME", help="time the layers in functions of every size there, instead of in this process"
    )
    _add_functions(verb)
    verb.add_argument("-o", "--output", default="profile.json", help="where to write (default: %(default)s)")


def _optimize(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "optimize",
        "choose cuts, function sizes and replicas",
        "funcpipe optimize profile.json --global-batch 64 --time-value 3.84 -o plan.json",
    )
    verb.add_argument("profile", help="the profile's file")
    _add_platform(verb, default=None)
    verb.add_argument("--global-batch", type=int, required=True, help="samples of one iteration")
    _add_wish(verb)
    _add_pins(verb)
    add_choice(verb, "--solver", list(solvers()), "auto", "what finds the plan, see docs/planning.md")
    verb.add_argument("--time-limit", type=float, metavar="S", help="stop the search after so many seconds")
    verb.add_argument(
        "--policy", default="funcpipe", metavar="NAME", help="another policy to plan by, see docs/planning.md"
    )
    verb.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="beside the plan as things are, what it would take and the best plan if they changed: bandwidth=2x, "
        "price=0.5x, request_price=0x, latency_s=0.01, contention=1.2, shared_bytes_s=1e9, sizes=1024MB,2048MB, "
        "profile=FILE",
    )
    verb.add_argument("--pareto", action="store_true", help="all plans that none beats both in time and in money")
    verb.add_argument("--figure", metavar="FILE", help="with --pareto: draw them")
    verb.add_argument("-o", "--output", default="plan.json", help="where to write (default: %(default)s)")


def _explain(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "explain",
        "say why a plan is as it is",
        "funcpipe explain plan.json --profile profile.json --time-value 3.84",
    )
    verb.add_argument("plan", help="the plan's file")
    verb.add_argument("--profile", required=True, help="the profile's file")
    _add_platform(verb, default=None)
    _add_wish(verb)
    _add_pins(verb)


def _add_wish(verb: argparse.ArgumentParser) -> None:
    """What is wanted of a plan."""
    wish = verb.add_mutually_exclusive_group()
    wish.add_argument(
        "--time-value", type=float, default=0.0, metavar="USD_PER_HOUR", help="what a saved hour is worth"
    )
    wish.add_argument("--deadline", type=float, metavar="S", help="the cheapest iteration within so many seconds")
    wish.add_argument("--budget", type=float, metavar="USD", help="the fastest iteration within so many dollars")
    verb.add_argument(
        "--iterations",
        type=int,
        default=1,
        metavar="N",
        help="--deadline and --budget are for a job of so many iterations",
    )
    add_choice(verb, "--optimizer", [kind.value for kind in OptimizerKind], "sgd", "the optimiser, by its state")
    add_choice(verb, "--wire", [wire.value for wire in Wire], "fp32", "number format of travelling activations")
    add_choice(verb, "--wire-back", ["same", *(wire.value for wire in Wire)], "same", "that of their gradients")
    add_choice(verb, "--recompute", [r.value for r in Recompute], "auto", "whether stages may recompute activations")
    add_choice(verb, "--schedule", ["auto", *(s.value for s in ScheduleKind)], "auto", "order of micro-batches")
    add_choice(verb, "--sync", ["auto", *(s.value for s in Sync)], "auto", "how replicas sum their gradients")
    verb.add_argument(
        "--shard-optimizer", action="store_true", help="divide the optimiser's state over replicas (ZeRO, stage 1)"
    )
    verb.add_argument("--replicas", metavar="N,N", help="degrees of data parallelism to consider (default: all)")


def _add_pins(verb: argparse.ArgumentParser) -> None:
    """What has been decided already."""
    pins = verb.add_argument_group("what is decided already")
    pins.add_argument("--cut", action="append", default=[], metavar="LAYER", help="a stage begins with this layer")
    pins.add_argument(
        "--together", action="append", default=[], metavar="LAYER,LAYER", help="these and all between share a stage"
    )
    pins.add_argument(
        "--size", action="append", default=[], metavar="LAYER=SIZE", help="the function that holds a layer"
    )
    pins.add_argument("--memory", type=int, metavar="MB", help="the memory of every function")
    pins.add_argument("--max-memory", type=int, metavar="MB", help="no function has more")
    pins.add_argument("--max-functions", type=int, metavar="N", help="no more functions at once")


def _simulate(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "simulate",
        "play one iteration of a plan on a virtual clock",
        "funcpipe simulate plan.json --profile profile.json --trace predicted.json",
    )
    verb.add_argument("plan", help="the plan's file")
    verb.add_argument("--profile", required=True, help="the profile's file")
    _add_platform(verb, default=None)
    verb.add_argument("--trace", metavar="FILE", help="write the events, for `report` and for Perfetto")
    verb.add_argument("--gantt", action="store_true", help="draw the lanes over time")
    verb.add_argument("--clip-grad-norm", action="store_true", help="the run will clip the norm of the gradient")
    disturbed = verb.add_argument_group("what befalls the functions")
    disturbed.add_argument("--compute-jitter", type=float, default=0.0, metavar="SHARE", help="spread of computation")
    disturbed.add_argument("--transfer-jitter", type=float, default=0.0, metavar="SHARE", help="spread of transfers")
    disturbed.add_argument("--seed", type=int, default=0, help="of the spread (default: %(default)s)")
    disturbed.add_argument("--cold", action="store_true", help="all functions begin with the platform's cold start")
    disturbed.add_argument(
        "--straggler", action="append", default=[], metavar="sN.rN=FACTOR", help="a worker that is so much slower"
    )
    disturbed.add_argument(
        "--death", action="append", default=[], metavar="sN.rN@S", help="a worker dies then, and does the step again"
    )


def _train(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "train",
        "train a model over functions by a plan",
        "funcpipe train experiments.models.digits:model --plan plan.json --platform local "
        "--data experiments.models.digits:train_data --optimizer experiments.models.digits:optimizer --epochs 6",
    )
    _add_training(verb)
    verb.add_argument("--platform", default="local", help="where functions run (default: %(default)s)")
    verb.add_argument(
        "--like",
        metavar="NAME",
        help="give local functions the memory, processors, links and lifetime of this platform",
    )
    verb.add_argument("--spec", metavar="FILE", help="the platform that the plan was made for, for the bill")
    verb.add_argument("--epochs", type=int, default=1, help="passes over the data (default: %(default)s)")
    add_life(verb)
    verb.add_argument("--trace", metavar="FILE", help="write the events of the last steps")
    verb.add_argument("-o", "--output", metavar="FILE", help="write the trained state_dict (torch.save)")


def _verify(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "verify",
        "train a few steps over functions and in one process, and compare",
        "funcpipe verify experiments.models.digits:model --plan plan.json --data experiments.models.digits:train_data",
    )
    _add_training(verb)
    verb.add_argument("--steps", type=int, default=3, help="steps to train (default: %(default)s)")
    verb.add_argument(
        "--tolerance", type=float, default=1e-4, help="relative difference that is rounding (default: %(default)s)"
    )


def _report(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "report",
        "set observed beside predicted",
        "funcpipe report observed.json --predicted predicted.json",
    )
    verb.add_argument("observed", help="the trace that `train` wrote")
    verb.add_argument("--predicted", required=True, help="the trace that `simulate` wrote")
    verb.add_argument("--figure", metavar="FILE", help="draw both over time (needs matplotlib)")
    verb.add_argument("--perfetto", metavar="FILE", help="write both, one below the other, for ui.perfetto.dev")


def _platforms(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "platforms",
        "list, show or measure platform specifications",
        "funcpipe platforms show aws-lambda --json\n  funcpipe platforms measure local --like aws-lambda -o mine.json",
    )
    verb.add_argument("action", choices=["list", "show", "measure"], nargs="?", default="list")
    verb.add_argument("name", nargs="?", help="which one to show, or to run functions on that measure it")
    _add_functions(verb)
    verb.add_argument("-o", "--output", metavar="FILE", help="with measure: where to write the specification")


def _add_training(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", metavar=_FACTORY, help="a function that makes the module")
    verb.add_argument("--plan", required=True, help="the plan's file")
    verb.add_argument("--data", metavar=_FACTORY, required=True, help="a function that makes the dataset")
    verb.add_argument(
        "--loss",
        metavar="MODULE:FUNCTION",
        default="torch.nn.functional:cross_entropy",
        help="of output and target; 'own' for the loss in the model's output (default: %(default)s)",
    )
    verb.add_argument(
        "--optimizer", metavar=_FACTORY, help="makes the optimiser from parameters (default: by the plan, with --lr)"
    )
    verb.add_argument("--lr", type=float, default=0.01, help="learning rate without --optimizer (default: %(default)s)")
    verb.add_argument(
        "--clip-grad-norm", type=float, metavar="NORM", help="clip the norm of the whole model's gradient"
    )
    verb.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout (default: %(default)s)")
    verb.add_argument(
        "--message-deadline",
        type=float,
        default=300.0,
        metavar="S",
        help="end the run when a message is so late (default: %(default)s)",
    )


def _add_functions(verb: argparse.ArgumentParser) -> None:
    """How functions run that measure something."""
    verb.add_argument("--like", metavar="NAME", help="impose the limits of this platform on local functions")
    verb.add_argument("--max-usd", type=float, metavar="USD", help="spend no more on functions than that")


def _add_platform(verb: argparse.ArgumentParser, *, default: str | None) -> None:
    group = verb.add_mutually_exclusive_group()
    default_text = default or "the profile's"
    group.add_argument("--platform", metavar="NAME", default=default, help=f"the platform (default: {default_text})")
    group.add_argument("--spec", metavar="FILE", help="a platform specification of your own")
