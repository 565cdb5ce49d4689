"""The options of train for its validation, and the metrics of all that measure."""

import argparse
from typing import Any

from funcpipe.cli.numbers import not_negative, whole
from funcpipe.cli.options import FACTORY, add_choice

METRIC = "NAME=MODULE:FACTORY"


def add_validation(verb: argparse.ArgumentParser) -> None:
    """The options of `train` for a validation meanwhile."""
    group = verb.add_argument_group("validation")
    group.add_argument(
        "--validation-data",
        metavar=f"{FACTORY}|URL",
        help="factory or URL of a dataset to validate on, in eval mode, meanwhile",
    )
    every = group.add_mutually_exclusive_group()
    every.add_argument("--validate-steps", type=whole(), metavar="N", help="validate every N steps")
    every.add_argument("--validate-epochs", type=whole(), metavar="N", help="validate every N epochs (default: 1)")
    add_metric(group)
    group.add_argument(
        "--monitor", default="val_loss", metavar="NAME", help="what decides the best validation: val_loss, or a metric"
    )
    add_choice(group, "--monitor-mode", ["min", "max"], "min", "whether the best is the smallest or the largest")
    group.add_argument("--patience", type=whole(), metavar="N", help="end after N validations that are no better")
    group.add_argument(
        "--min-delta", type=not_negative, default=0.0, metavar="X", help="differences up to X are no better"
    )
    group.add_argument("--best", metavar="FILE", help="write the state_dict with the best validation, as with -o")


def add_metric(group: Any) -> None:
    """`--metric`, as often as wanted."""
    group.add_argument(
        "--metric",
        dest="metrics",
        action="append",
        default=[],
        metavar=METRIC,
        help="a metric of torchmetrics or evaluate, a factory of one, or a function of output and target; may be "
        "repeated",
    )
