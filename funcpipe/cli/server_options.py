"""The options of train-server."""

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
    add_verb,
)
from funcpipe.core import Interval, OptimizerKind


def add_train_server(verbs: Any) -> None:
    """`funcpipe train-server`."""
    verb = add_verb(
        verbs,
        "train-server",
        "train around a parameter server, as provision chose",
        "funcpipe train-server funcpipe.examples.spirals:model --provision provision.json --way spotdnn \\\n"
        "    --data funcpipe.examples.spirals:train_data --global-batch 64 --micro-batch 8 --epochs 6",
        module="server_verbs",
    )
    add_model(verb)
    _add_machines(verb)
    _add_training(verb)
    limits = verb.add_argument_group("limits", "Of training on functions, which stops there.")
    add_limits(limits)
    limits.add_argument("--yes", action="store_true", help="do not ask whether the expected cost is right")
    verb.add_argument_group("output").add_argument(
        "-o", "--output", metavar="FILE", help="write the trained state_dict: .safetensors, .pt or .pth"
    )


def _add_machines(verb: argparse.ArgumentParser) -> None:
    cluster = verb.add_argument_group("machines and data")
    cluster.add_argument(
        "--provision", required=True, metavar="FILE", help="what `funcpipe provision --json` has printed"
    )
    cluster.add_argument("--way", metavar="WAY", help="the way to train by (default: the one that is recommended)")
    cluster.add_argument(
        "--market", metavar="NAME|FILE", help="the market of the machines (default: that of the provision)"
    )
    cluster.add_argument(
        "--platform",
        metavar="URL",
        help="a Ray cluster that has the machines, such as ray://auto, or a deployment that has the functions, such as "
        "aws-lambda://NAME (default: processes of this machine; those of a way on machines need Ray: extra `ray`)",
    )
    cluster.add_argument("--like", metavar="NAME", help="give local functions the limits of this platform")
    cluster.add_argument(
        "--storage",
        metavar="URL",
        help="where the data and the server's state are kept, and what functions exchange, such as redis://host/0",
    )
    cluster.add_argument("--data", metavar=f"{FACTORY}|URL", required=True, help="factory or URL of the dataset")
    add_blocks(cluster)


def _add_training(verb: argparse.ArgumentParser) -> None:
    training = verb.add_argument_group("training")
    add_choice(
        training,
        "--updates",
        ["bsp", "asp"],
        "bsp",
        "update with the gradients of a whole global batch, as one process does, or with each push of a worker",
    )
    training.add_argument("--global-batch", type=whole(), required=True, metavar="N", help="samples of an update")
    training.add_argument("--micro-batch", type=whole(), required=True, metavar="N", help="samples dealt out at once")
    training.add_argument("--epochs", type=whole(), default=1, metavar="N", help="passes over the data")
    add_loss(training)
    training.add_argument("--optimizer", metavar=FACTORY, help="factory that takes the parameters (default: --kind)")
    add_choice(training, "--kind", [kind.value for kind in OptimizerKind], OptimizerKind.SGD.value, "the optimiser")
    training.add_argument("--lr", type=positive, default=0.01, metavar="RATE", help="learning rate of --kind")
    training.add_argument("--scheduler", metavar=FACTORY, help="factory that takes the optimiser")
    add_choice(
        training, "--scheduler-interval", [interval.value for interval in Interval], "epoch", "when it is stepped"
    )
    training.add_argument("--clip-grad-norm", type=positive, metavar="NORM", help="clip the norm of the gradient")
    training.add_argument("--clip-grad-value", type=positive, metavar="VALUE", help="clip each element of the gradient")
    add_precision(training, default="fp32")
    training.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="seed of weights, order and dropout"
    )
    training.add_argument(
        "--checkpoint", type=whole(0), default=0, metavar="N", help="save the server after every N updates"
    )
    training.add_argument("--run-name", metavar="RUN", help="name of the run; one that was saved goes on")
