"""The verb fit: profile, optimize and train in one."""

import os
from typing import TYPE_CHECKING

from funcpipe.cli import train, training
from funcpipe.cli.factories import load_data
from funcpipe.cli.files import write_file
from funcpipe.cli.options import group, not_negative, option, whole
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import Coupled, OptimizerKind, Plan, read, write
from funcpipe.core.process import say
from funcpipe.platforms.catalog import LOCAL, places_of

if TYPE_CHECKING:
    from funcpipe.api.fit import FuncPipe
    from funcpipe.api.fitting import Chosen, Wanted


@verb(
    "funcpipe fit funcpipe.examples.spirals:model --data funcpipe.examples.spirals:train_data \\\n"
    "    --optimizer funcpipe.examples.spirals:optimizer --epochs 6",
    training.MODEL,
    group("data", training.data("data.train"), training.BLOCKS),
    group("training", train.learning("SGD, with --lr", "fp32"), train.LENGTH),
    group(
        "plan: The cheapest, unless an hour is worth something.",
        option(
            "--global-batch N",
            "samples of a step, over all functions (default: the DataLoader's batch_size, or 32)",
            whole(),
            key="plan.global-batch",
        ),
        option(
            "--micro-batch N",
            "samples that a function takes at once (default: the best of some that are measured)",
            whole(),
            key="model.micro-batch",
        ),
        option("--time-value USD", "what an hour saved is worth", not_negative, 0.0, key="plan.time-value"),
        option(
            "--plan FILE",
            "take the plan that is here, if it is for this; otherwise write the new one here",
            key="plan.file",
            writes="plan",
        ),
    ),
    train.VALIDATION,
    training.RUN_PLATFORM,
    training.LIKE,
    train.RUN,
    training.FAULTS,
    train.LIMITS,
    train.OUTPUT,
    common=(
        *("--data", "--loss", "--optimizer", "--lr", "--epochs", "--precision", "--validation-data", "--global-batch"),
        *("--platform", "--storage", "--resume", "--max-usd", "--dry-run", "--yes", "--output"),
    ),
    table="training",
)
def fit(options: Options) -> None:
    """Profile a model, plan, say what that costs, and train.

    Each of these steps is also a verb of its own: profile, optimize, train. Of several platforms, as in --platform
    local,aws-lambda, it takes the best, and says why.
    """
    train.check_given(options)
    output = train.model_file(options)
    training.check_code(options)
    kept = read(Plan, options.plan) if options.plan is not None and os.path.exists(options.plan) else None
    training.load_torch(LOCAL if LOCAL in places_of(options.platform) else options.platform)
    pipe = training.pipe_of(
        options,
        optimizer=training.optimizer_of(options, OptimizerKind.SGD),
        average=train.average_of(options),
        coupled=options.coupled or Coupled.REFUSE,
    )
    from funcpipe.api.fitting import Wanted
    from funcpipe.api.placing import clusters
    from funcpipe.client.control.commands import resumed_by

    wanted = Wanted(
        platform=options.platform,
        like=options.like,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        time_value=options.time_value,
    )
    with clusters(options.platform), resumed_by("fit"):
        options.platform, chosen = _chosen(options, pipe, wanted, kept)
        _say(options, chosen)
        if options.plan is not None and chosen.plan is not kept:
            write_file(lambda path: write(chosen.plan, path), options.plan)
        train.train_by(options, chosen.plan, pipe, output)


def _chosen(options: Options, pipe: "FuncPipe", wanted: "Wanted", kept: Plan | None) -> tuple[str, "Chosen"]:
    """The platform to train on, and the plan to train by, for the data and the length that the command names."""
    from funcpipe.api.placing import choose_among_places

    return choose_among_places(
        pipe,
        load_data(options.data),
        wanted,
        epochs=options.epochs,
        validation=train.validation_of(options),
        limits=training.limits_of(options),
        settings=training.run_of(options)["settings"],
        kept=kept,
    )


def _say(options: Options, chosen: "Chosen") -> None:
    """Say what was chosen; the last line is that of a dry run, too."""
    if not options.quiet and not options.json:
        say("\n".join(chosen.lines[:-1] if options.dry_run else chosen.lines))
