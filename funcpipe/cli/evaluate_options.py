"""The options of evaluate and predict."""

import argparse
from typing import Any

from funcpipe.cli.numbers import whole
from funcpipe.cli.options import FACTORY, add_blocks, add_limits, add_loss, add_model, add_precision, add_verb
from funcpipe.cli.train_options import add_fault_tolerance, add_message_deadline, add_platform
from funcpipe.cli.validation_options import add_metric


def add_evaluate(verbs: Any) -> None:
    """`funcpipe evaluate`."""
    verb = add_verb(
        verbs,
        "evaluate",
        "measure loss and metrics in eval mode, on functions",
        "funcpipe evaluate funcpipe.examples.spirals:model --plan plan.json \\\n"
        "    --data funcpipe.examples.spirals:train_data --weights spirals.pt",
        module="evaluate_verbs",
    )
    evaluation = _add_model(verb)
    add_loss(evaluation)
    add_metric(evaluation)
    _add_common(verb)


def add_predict(verbs: Any) -> None:
    """`funcpipe predict`."""
    verb = add_verb(
        verbs,
        "predict",
        "write a model's outputs for all samples, in order",
        "funcpipe predict funcpipe.examples.spirals:model --plan plan.json \\\n"
        "    --data funcpipe.examples.spirals:train_data --weights spirals.pt -o outputs.safetensors",
        module="evaluate_verbs",
    )
    evaluation = _add_model(verb)
    evaluation.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="write the outputs by name, as a safetensors file"
    )
    _add_common(verb)


def _add_model(verb: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    add_model(verb)
    group = verb.add_argument_group("plan and data")
    group.add_argument("--plan", required=True, metavar="FILE", help="plan written by `funcpipe optimize`")
    group.add_argument(
        "--data",
        metavar=f"{FACTORY}|URL",
        required=True,
        help="factory that returns the dataset, called in the functions; or the URL of one, as s3://bucket/prefix",
    )
    group.add_argument("--weights", metavar="FILE", help="a state_dict of the model, as `funcpipe train -o` writes it")
    add_blocks(group)
    return verb.add_argument_group("evaluation")


def _add_common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--seed",
        type=whole(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="seed of the model, where no weights are given",
    )
    add_precision(verb, default=None)
    add_platform(verb)
    verb.add_argument("--run", dest="run_name", metavar="NAME", help="name of the run (default: a random one)")
    add_message_deadline(add_fault_tolerance(verb))
    limits = verb.add_argument_group("limits")
    add_limits(limits)
    limits.add_argument(
        "--yes", action="store_true", help="start though a limit is expected to be reached before the last sample"
    )
