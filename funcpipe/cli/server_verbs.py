"""The verb train-server."""

import argparse
from functools import partial
from typing import Any

from funcpipe import show as render
from funcpipe.cli.factories import check_names, load_data, load_factory, make_model
from funcpipe.cli.model_files import check_holds, check_model_file, free_model_file, write_somewhere
from funcpipe.cli.provision_files import chosen_way
from funcpipe.cli.train_cost import ask
from funcpipe.cli.train_values import optimizer_of, run_limits
from funcpipe.core import OptimizerKind
from funcpipe.core.texts import time_text, usd_text
from funcpipe.errors import InputError
from funcpipe.platforms.machine_catalog import load_market


def train_server(options: argparse.Namespace) -> None:
    """Train a model around a parameter server, and write it to a file."""
    way, found = chosen_way(options.provision, options.way)
    market = load_market(options.market or found)
    if options.checkpoint and options.storage is None:
        raise InputError("--checkpoint saves the server's state into a storage: give --storage URL too")
    check_model_file(options.output)
    output = options.output or free_model_file()
    check_names({"the model": options.model, "--data": options.data})
    import torch

    from funcpipe.api import FuncPipe
    from funcpipe.neighbours.parameter_server.on_machines import cluster_of

    cluster_of(way, market, platform=options.platform, like=options.like)  # mistakes are reported before any question
    ask(options, [f"{way.way} is predicted to take {time_text(way.seconds)} and {usd_text(way.usd)}: {way.text}"])

    torch.manual_seed(options.seed)
    pipe = FuncPipe(
        make_model(options.model),
        loss_fn=None if options.loss == "own" else load_factory(options.loss),
        optimizer=optimizer_of(options, OptimizerKind(options.kind)),
        clip_grad_norm=options.clip_grad_norm,
        clip_grad_value=options.clip_grad_value,
        scheduler=load_factory(options.scheduler) if options.scheduler else None,
        scheduler_interval=options.scheduler_interval,
        precision=options.precision,
        name=options.model,
        blocks=options.blocks,
    )
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
        limits=run_limits(options),
        seed=options.seed,
        storage=options.storage,
        run=options.run_name,
    )
    write_somewhere(result.state_dict(), output, result.run)
    summary: dict[str, Any] = {"run": result.run, "way": way.way, "updates": result.updates.value}
    summary |= {"seconds": result.seconds, "cost_usd": result.usd, "losses": result.losses, "step_s": result.step_s}
    summary |= {"pushes": [_push(push) for push in result.pushes], "lost": result.lost, "model": output}
    draw = partial(render.server_result, result, way, output)
    render.show(options.json, render.as_json(summary), draw)


def _push(push: Any) -> dict[str, Any]:
    names = ("worker", "samples", "loss", "staleness", "iterations", "time_s")
    return {name: getattr(push, name) for name in names}
