"""The verb provision train: training around a parameter server."""

from functools import partial
from typing import Any

from funcpipe import show
from funcpipe.cli import training
from funcpipe.cli.estimate import ask
from funcpipe.cli.factories import load_data
from funcpipe.cli.files import check_holds, check_model_file, free_model_file, write_somewhere
from funcpipe.cli.options import Choice, group, option, whole
from funcpipe.cli.provision import chosen_way
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import OptimizerKind
from funcpipe.core.texts import time_text, usd_text
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_market


@verb(
    "funcpipe provision train funcpipe.examples.spirals:model --provision provision.json --way spotdnn \\\n"
    "    --data funcpipe.examples.spirals:train_data --global-batch 64 --micro-batch 8 --epochs 6",
    training.MODEL,
    group(
        "machines and data",
        option("--provision FILE", "what `funcpipe provision compare --json` has printed", needed=True, reads=True),
        option("--way WAY", "the way to train by (default: the one that is recommended)"),
        option("--market NAME|FILE", "the market of the machines (default: that of the provision)"),
        option(
            "--platform URL",
            "a Ray cluster that has the machines, such as ray://auto, or a deployment that has the functions, such as "
            "aws-lambda://NAME (default: processes of this machine; those of a way on machines need Ray: extra `ray`)",
        ),
        option("--like NAME", "give local functions the limits of this platform"),
        option(
            "--storage URL",
            "where the data and the server's state are kept, and what functions exchange, such as redis://host/0",
        ),
        training.data(""),
        training.BLOCKS,
    ),
    group(
        "training",
        option(
            "--updates",
            "update with the gradients of a whole global batch, as one process does, or with each push of a worker",
            Choice(("bsp", "asp")),
            "bsp",
        ),
        option("--global-batch N", "samples of an update", whole(), needed=True),
        option("--micro-batch N", "samples dealt out at once", whole(), needed=True),
        option("--epochs N", "passes over the data", whole(), 1),
        training.learning("--kind"),
        option("--kind", "the optimiser", OptimizerKind, OptimizerKind.SGD),
        training.precision("fp32"),
        training.seed("weights, order and dropout"),
        option("--checkpoint N", "save the server after every N updates", whole(0), 0),
        option("--run-name RUN", "name of the run; one that was saved goes on"),
    ),
    group(
        "limits: Of training on functions, which stops there.",
        training.LIMITS,
        option("--yes", "do not ask whether the expected cost is right"),
    ),
    group("output", option("-o --output FILE", "write the trained state_dict: .safetensors, .pt or .pth", writes="")),
)
def train(options: Options) -> None:
    """Train a model around a parameter server, and write it to a file."""
    way, found = chosen_way(options.provision, options.way)
    market = load_market(options.market or found)
    if options.checkpoint and options.storage is None:
        raise InputError("--checkpoint saves the server's state into a storage: give --storage URL too")
    check_model_file(options.output)
    output = options.output or free_model_file()
    training.check_code(options)
    from funcpipe.neighbours.parameter_server.on_machines import cluster_of

    cluster_of(way, market, platform=options.platform, like=options.like)  # mistakes are reported before any question
    ask(options, [f"{way.way} is predicted to take {time_text(way.seconds)} and {usd_text(way.usd)}: {way.text}"])

    pipe = training.pipe_of(options, optimizer=training.optimizer_of(options, options.kind))
    check_holds(output, pipe.model.state_dict())
    result = pipe.train_with_server(
        load_data(options.data),
        way=way,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        epochs=options.epochs,
        updates=options.updates,
        market=market,
        platform=options.platform,
        like=options.like,
        save_every=options.checkpoint,
        limits=training.limits_of(options),
        seed=options.seed,
        storage=options.storage,
        run=options.run_name,
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
