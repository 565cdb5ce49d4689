"""What the verb train does for a way around a parameter server, as `provision compare` has found it."""

from functools import partial
from typing import Any

from funcpipe import show
from funcpipe.cli import training
from funcpipe.cli.estimate import ask
from funcpipe.cli.factories import load_data
from funcpipe.cli.files import check_holds, free_model_file, write_somewhere
from funcpipe.cli.options import Choice, group, named, setting, whole
from funcpipe.cli.provision import PlanOrWay
from funcpipe.cli.verbs import Options
from funcpipe.core import Coupled, OptimizerKind, Precision, to_text
from funcpipe.core.texts import time_text, usd_text
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import LOCAL, load_market

SERVER = group(
    "parameter server",
    setting(
        "training.updates",
        "of a way with a parameter server: update with the gradients of a whole global batch, as one process does, or "
        "with each push of a worker",
        Choice(("bsp", "asp")),
        "bsp",
    ),
    setting("plan.global-batch N", "of such a way: samples of an update (default: those of the job)", whole()),
    setting("model.micro-batch N", "of such a way: samples dealt out at once", whole()),
    setting("platform.market NAME|FILE", "of such a way: the market of the machines (default: that of the job)"),
)
"""The settings of training around a parameter server."""

_BY_PLAN = (
    *("ema", "validation_data", "every_steps", "every_epochs", "metrics", "monitor", "mode", "patience", "min_delta"),
    *("best", "spec", "detach", "take_over", "from_start", "keep_model", "rehearse", "failure_interval_s", "on_oom"),
    *("on_drift", "message_deadline_s", "log", "trace", "averaged_output", "loss_output"),
)
"""What only training by a plan does."""


def check_by_plan(options: Options) -> None:
    """Raise InputError for what only a way with a parameter server needs, where a plan says it."""
    for one in SERVER:
        if one.name in options.given:
            raise InputError(f"{named(one)} is for a way with a parameter server: a plan has its own")


def train_around_server(options: Options, chosen: PlanOrWay) -> None:
    """Train a model by a way with a parameter server, and write it to a file, or only say what that would take."""
    way = chosen.way
    assert way is not None, "it is no plan"
    for one in options.command.params:
        if one.name in _BY_PLAN and one.name in options.given:
            raise InputError(f"{named(one)} is for training by a plan, and the way {way.way} has none")
    market, platform = load_market(options.market or chosen.market), _elsewhere(options.platform)
    global_batch = options.global_batch or chosen.global_batch
    if options.checkpoint_steps and options.storage is None:
        raise InputError("training.checkpoint saves the server's state into a storage: give --storage URL too")
    training.check_code(options)
    from funcpipe.neighbours.parameter_server.on_machines import cluster_of

    cluster_of(way, market, platform=platform, like=options.like)  # mistakes are reported before any question
    if global_batch is None or options.micro_batch is None:
        key = "plan.global-batch" if global_batch is None else "model.micro-batch"
        raise InputError(f"the way {way.way} does not say how large a batch is: give --set {key}=N")
    line = f"{way.way} is predicted to take {time_text(way.seconds)} and {usd_text(way.usd)}: {way.text}"
    if options.dry_run:
        show.show(options.json, to_text(way), lambda: line)
        return
    ask(options, [line])
    output = options.output or free_model_file()
    pipe = training.pipe_of(
        options,
        optimizer=training.optimizer_of(options, OptimizerKind.SGD),
        precision=options.precision or Precision.FP32,
        coupled=options.coupled or Coupled.REFUSE,
    )
    check_holds(output, pipe.model.state_dict())
    result = pipe.train_with_server(
        load_data(options.data),
        way=way,
        global_batch=global_batch,
        micro_batch=options.micro_batch,
        epochs=options.epochs,
        updates=options.updates,
        market=market,
        platform=platform,
        like=options.like,
        save_every=options.checkpoint_steps or 0,
        limits=training.limits_of(options),
        seed=options.seed,
        storage=options.storage,
        run=options.resume or options.name,
    )
    write_somewhere(result.state_dict(), output, result.run)
    summary: dict[str, Any] = {"run": result.run, "way": way.way, "updates": result.updates.value}
    summary |= {"seconds": result.seconds, "cost_usd": result.usd, "losses": result.losses, "step_s": result.step_s}
    summary |= {"pushes": [_push(push) for push in result.pushes], "lost": result.lost, "model": output}
    draw = partial(show.server_result, result, way, output)
    show.show(options.json, show.as_json(summary), draw)


def _push(push: Any) -> dict[str, Any]:
    names = ("worker", "samples", "loss", "staleness", "iterations", "time_s")
    return {name: getattr(push, name) for name in names}


def _elsewhere(platform: str) -> str | None:
    """Where the way's functions or machines are, unless they are processes of this machine."""
    return None if platform == LOCAL else platform
