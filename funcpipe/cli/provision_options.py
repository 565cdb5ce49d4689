"""The options of provision and fit-loss."""

import argparse
from typing import Any

from funcpipe.cli.numbers import not_negative, positive, whole
from funcpipe.cli.options import add_choice, add_platform, add_verb
from funcpipe.core import OptimizerKind


def add_provision(verbs: Any) -> None:
    """`funcpipe provision`."""
    verb = add_verb(
        verbs,
        "provision",
        "compare ways to do a job, by functions and machines",
        "funcpipe provision profile.json --samples 50000 --global-batch 64 --epochs 3 --deadline 3600",
        module="provision_verbs",
    )
    verb.add_argument("profile", metavar="PROFILE", help="profile to plan from, written by `funcpipe profile`")
    job = verb.add_argument_group("job")
    job.add_argument("--samples", type=whole(), required=True, metavar="N", help="samples of the dataset")
    job.add_argument("--global-batch", type=whole(), required=True, metavar="N", help="samples of an update")
    goal = job.add_mutually_exclusive_group(required=True)
    goal.add_argument("--epochs", type=positive, metavar="N", help="train so many epochs")
    goal.add_argument("--target-loss", type=float, metavar="X", help="train until the loss is X; needs --loss-model")
    job.add_argument("--loss-model", metavar="FILE", help="how the loss falls, written by `funcpipe fit-loss`")
    job.add_argument("--deadline", type=positive, metavar="SECONDS", help="when the whole job must be done")
    job.add_argument("--budget", type=positive, metavar="USD", help="what the whole job may cost")
    job.add_argument(
        "--miss-chance", type=not_negative, default=0.05, metavar="P", help="how likely the deadline may be missed"
    )
    add_choice(job, "--optimizer", [kind.value for kind in OptimizerKind], OptimizerKind.SGD.value, "the optimiser")
    market = verb.add_argument_group("market")
    add_platform(market, default=None)
    market.add_argument("--market", default="aws", metavar="NAME|FILE", help="the machines: aws, aliyun, or a file")
    market.add_argument(
        "--gpu-speed",
        action="append",
        default=[],
        metavar="GPU=VCPUS",
        help="this model of GPU computes like so many vCPUs, such as T4=40; may be repeated",
    )
    search = verb.add_argument_group("search")
    search.add_argument("--ways", metavar="WAY,WAY", help="only these ways; docs/provisioning.md lists them")
    search.add_argument(
        "--count-server", action="store_true", help="let lambdadnn and spotdnn count the server while they search"
    )
    search.add_argument("--figure", metavar="FILE", help="draw dollars over time of all ways (needs matplotlib)")


def add_fit_loss(verbs: Any) -> None:
    """`funcpipe fit-loss`."""
    verb = add_verb(
        verbs,
        "fit-loss",
        "fit how the loss of runs falls, for provision",
        "funcpipe fit-loss losses.csv --batch 64 -o loss.json",
        module="provision_verbs",
    )
    verb.add_argument(
        "curves",
        nargs="+",
        metavar="CURVE",
        help="losses by step: a .csv as CSVLogger writes it, a .json, or with --storage the name of a run",
    )
    curve = verb.add_argument_group("curves")
    curve.add_argument("--storage", metavar="URL", help="where runs keep their objects: the curves are runs in it")
    curve.add_argument("--run", dest="run_name", metavar="RUN", help="which run of a CSV file with several")
    curve.add_argument("--batch", metavar="N,N", help="samples of an iteration, one number or one for each curve")
    curve.add_argument("--workers", metavar="N,N", default="1", help="asynchronous workers, as with --batch")
    curve.add_argument("--convergence", metavar="X,X", default="0", help="convergence coefficients, as with --batch")
    curve.add_argument(
        "--skip",
        type=whole(0),
        metavar="N",
        help="leave out the first N steps of each curve (default: a tenth of them)",
    )
    model = verb.add_argument_group("model")
    add_choice(
        model,
        "--form",
        ["inverse", "weighted"],
        "inverse",
        "inverse: scale/steps + floor; weighted: equation (3) of spotDNN, which needs several batches",
    )
    model.add_argument("--target-loss", type=float, metavar="X", help="say how long this loss takes")
    _add_output(verb)


def _add_output(verb: argparse.ArgumentParser) -> None:
    verb.add_argument_group("output").add_argument(
        "-o", "--output", metavar="FILE", default="loss.json", help="write the loss model here"
    )
