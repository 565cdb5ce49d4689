"""The options of train and verify."""

import argparse
from typing import Any

from funcpipe.cli.numbers import positive, whole
from funcpipe.cli.options import (
    FACTORY,
    add_blocks,
    add_choice,
    add_limits,
    add_loss,
    add_model,
    add_precision,
    add_teachers,
    add_verb,
)
from funcpipe.cli.validation_options import add_validation
from funcpipe.core import Coupled, Interval


def add_train(verbs: Any) -> None:
    """`funcpipe train`."""
    verb = add_verb(
        verbs,
        "train",
        "train a model on functions, by a plan",
        "funcpipe train funcpipe.examples.spirals:model --plan plan.json \\\n"
        "    --data funcpipe.examples.spirals:train_data --optimizer funcpipe.examples.spirals:optimizer --epochs 6",
        module="train_verbs",
        common=(
            *("--plan", "--data", "--loss", "--optimizer", "--lr", "--epochs", "--validation-data"),
            *("--platform", "--storage", "--resume", "--max-usd", "--dry-run", "--output"),
        ),
    )
    training = _add_model(verb)
    training.add_argument("--epochs", type=whole(), default=1, metavar="N", help="passes over the data")
    add_validation(verb)
    add_platform(verb)
    _add_run(verb)
    add_message_deadline(add_fault_tolerance(verb))
    limits = verb.add_argument_group("limits", "The run stops at a limit, and what it has saved can be resumed.")
    add_limits(limits)
    limits.add_argument(
        "--dry-run", action="store_true", help="say what the job is expected to take and to cost, and start nothing"
    )
    limits.add_argument(
        "--yes",
        action="store_true",
        help="do not ask whether the expected cost is right, nor whether a limit will be reached before the last step",
    )
    output = verb.add_argument_group("output")
    output.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="KIND:WHERE",
        help="log all steps to csv:FILE, tensorboard:FOLDER, mlflow:URI or wandb:PROJECT; can be given several times",
    )
    output.add_argument("--trace", metavar="FILE", help="write the events of the last steps, for `funcpipe report`")
    output.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the trained state_dict: .safetensors, or .pt or .pth with torch.save (default: model.safetensors, "
        "or a name with a number; none with --storage, which keeps the model for `funcpipe export`)",
    )
    training.add_argument(
        "--ema", type=positive, metavar="DECAY", help="keep the exponential moving average of the parameters"
    )
    output.add_argument(
        "--averaged-output", metavar="FILE", help="write the state_dict with those averages (--ema), as with -o"
    )
    output.add_argument(
        "--loss-output",
        metavar="FILE",
        help="write the state_dict of a loss that has parameters of its own, as with -o",
    )


def add_verify(verbs: Any) -> None:
    """`funcpipe verify`."""
    verb = add_verb(
        verbs,
        "verify",
        "compare a short run with training in one process",
        "funcpipe verify funcpipe.examples.spirals:model --plan plan.json \\\n"
        "    --data funcpipe.examples.spirals:train_data",
        module="train_verbs",
    )
    _add_model(verb)
    comparison = verb.add_argument_group("comparison")
    comparison.add_argument("--steps", type=whole(), default=3, metavar="N", help="steps to train")
    comparison.add_argument(
        "--tolerance",
        type=positive,
        default=1e-4,
        metavar="SHARE",
        help="difference, as a share of what training changed, that counts as rounding",
    )
    add_message_deadline(verb.add_argument_group("fault tolerance"))


def _add_model(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of the model, the plan and training; return the group of the last."""
    add_model(verb)
    _add_plan_and_data(verb)
    training = verb.add_argument_group("training")
    add_loss(training)
    training.add_argument(
        "--optimizer",
        metavar=FACTORY,
        help="factory that takes the parameters and returns an optimiser (default: the plan's kind, with --lr)",
    )
    training.add_argument(
        "--lr", type=positive, default=0.01, metavar="RATE", help="learning rate where --optimizer is not given"
    )
    training.add_argument(
        "--scheduler", metavar=FACTORY, help="factory that takes the optimiser and returns a learning-rate scheduler"
    )
    add_choice(
        training, "--scheduler-interval", [interval.value for interval in Interval], "epoch", "when it is stepped"
    )
    training.add_argument(
        "--clip-grad-norm", type=positive, metavar="NORM", help="clip the norm of the whole model's gradient"
    )
    training.add_argument(
        "--clip-grad-value", type=positive, metavar="VALUE", help="clip each element of the gradient to this size"
    )
    add_teachers(training)
    add_precision(training, default=None)
    add_choice(
        training,
        "--on-nan",
        ["stop", "skip", "ignore"],
        "stop",
        "when a loss or gradients are NaN or infinite, end the run, skip that step, or train on",
    )
    add_choice(
        training,
        "--reduction",
        ["mean", "weighted", "tokens"],
        "mean",
        "what the loss returns: a mean over samples, (sum, weight), or torch's mean over targets that are not ignored",
    )
    training.add_argument(
        "--coupled",
        choices=[kind.value for kind in Coupled],
        help="when the loss of a batch is not the mean of its micro-batches' losses, start nothing, train on their "
        "mean as gradient accumulation does, or compute it once for the whole batch, by a plan made with `--coupled "
        "cache` (default: cache for such a plan, else refuse)",
    )
    training.add_argument(
        "--seed",
        type=whole(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="seed of the weights, the order of the data and dropout",
    )
    return training


def _add_plan_and_data(verb: argparse.ArgumentParser) -> None:
    plan = verb.add_argument_group("plan and data")
    plan.add_argument(
        "--plan",
        required=True,
        metavar="FILE",
        help="plan written by `funcpipe optimize`, or ways that `funcpipe provision --json` has printed",
    )
    plan.add_argument(
        "--way", metavar="WAY", help="of several ways, the one whose plan to take (default: the one recommended)"
    )
    plan.add_argument(
        "--data",
        metavar=f"{FACTORY}|URL",
        required=True,
        help="factory that returns the dataset, called in the functions; or the URL of one, as s3://bucket/prefix",
    )
    add_blocks(plan)


def add_platform(verb: argparse.ArgumentParser) -> None:
    """Add the options of the platform and of the storage."""
    group = verb.add_argument_group("platform")
    group.add_argument(
        "--platform",
        default="local",
        metavar="PLATFORM",
        help="where functions run: `local` for processes of this machine, `ray://…` for Ray, or a "
        "deployment's URL, such as aws-lambda://funcpipe?region=eu-central-1",
    )
    group.add_argument(
        "--like",
        metavar="NAME",
        help="give local functions the memory, processors, links and lifetime of this platform",
    )
    group.add_argument(
        "--storage",
        metavar="URL",
        help="where the run keeps its objects, such as file:///tmp/runs, s3://bucket/prefix or redis://host/0 "
        "(default: a temporary folder, or the deployment's own storage). For a plan with several stores: "
        "default=URL,messages=URL,sums=URL,checkpoints=URL",
    )
    group.add_argument(
        "--spec", metavar="FILE", help="platform specification to price the bill with (default: the plan's platform)"
    )


def _add_run(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("run")
    group.add_argument("--run", dest="run_name", metavar="NAME", help="name of the new run (default: a random one)")
    group.add_argument(
        "--resume",
        metavar="RUN",
        help="watch this run if it is still running; otherwise continue it from its newest checkpoint, "
        "by the same or another plan",
    )
    group.add_argument(
        "--detach", action="store_true", help="start the functions and return; --resume RUN collects the result"
    )
    group.add_argument(
        "--take-over",
        action="store_true",
        help="if another command trains the run, end that at a saved step, and continue the run here",
    )
    group.add_argument(
        "--from-start",
        action="store_true",
        help="with --resume, train again from the first step, with the parameters that were uploaded then",
    )

    group.add_argument(
        "--no-keep-model",
        dest="keep_model",
        action="store_false",
        help="delete the run when it has finished (default: with --storage or a deployment, its model is kept)",
    )
    group.add_argument(
        "--no-rehearsal",
        dest="rehearse",
        action="store_false",
        help="start at once, without training on one micro-batch here to find mistakes",
    )


def add_fault_tolerance(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options of fault tolerance; return their group."""
    group = verb.add_argument_group("fault tolerance")
    group.add_argument(
        "--checkpoint",
        type=whole(),
        metavar="N",
        help="save a checkpoint every N steps (default: an interval that suits the measured times)",
    )
    group.add_argument(
        "--failure-interval",
        type=positive,
        default=86_400.0,
        metavar="SECONDS",
        help="expected time between failures of a function, from which the checkpoint interval follows",
    )
    add_choice(
        group,
        "--on-oom",
        ["fail", "grow"],
        "fail",
        "when a function runs out of memory, end the run or continue with larger functions",
    )
    add_choice(
        group,
        "--on-drift",
        ["copy", "fail"],
        "copy",
        "when replicas come to differ, as on unlike processors, copy the parameters of the first or end the run",
    )
    return group


def add_message_deadline(group: argparse._ArgumentGroup) -> None:
    """Add the option of the message deadline."""
    group.add_argument(
        "--message-deadline",
        type=positive,
        default=300.0,
        metavar="SECONDS",
        help="end the run when a worker has waited this long for a message",
    )
