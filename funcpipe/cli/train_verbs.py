"""The verbs train and verify."""

import argparse
from functools import partial
from typing import Any

from funcpipe.cli import render
from funcpipe.cli.factories import load_factory
from funcpipe.cli.files import write_file
from funcpipe.cli.train_values import fault_tolerance, plan_and_model, run_limits, run_settings, storage_url
from funcpipe.core import Plan, to_text, write_trace
from funcpipe.errors import Disagreement


def train(options: argparse.Namespace) -> None:
    """Train a model on functions, by a plan."""
    import torch

    plan, pipe = plan_and_model(options)
    settings = _settings(options, plan)
    if options.detach:
        run = pipe.start(load_factory(options.data), **settings)
        render.show(options.json, render.as_json({"run": run}), partial(render.detached, run, storage_url(options)))
        return
    with render.training(quiet=options.json or options.quiet) as on_progress:
        result = pipe.train(load_factory(options.data), **settings, on_progress=on_progress)
    if options.trace:
        write_file(partial(write_trace, result.trace), options.trace)
    if options.output:
        write_file(partial(torch.save, result.state_dict()), options.output)
    summary = {"run": result.run, "losses": result.losses, "cost_usd": result.bill.cost_usd, "trace": options.trace}
    written = {"trace": options.trace, "state_dict": options.output}
    render.show(options.json, render.as_json(summary), partial(render.training_result, result, written))


def verify(options: argparse.Namespace) -> None:
    """Train a few steps on local functions and in one process, and compare every tensor."""
    plan, pipe = plan_and_model(options)
    found = pipe.verify(
        load_factory(options.data),
        steps=options.steps,
        plan=plan,
        seed=options.seed,
        tolerance=options.tolerance,
        message_deadline_s=options.message_deadline,
    )
    render.show(options.json, to_text(found), partial(render.verification, found))
    first = found.first_difference
    if first is not None:
        raise Disagreement(
            f"the first layer that differs is {first.layer}: {first.name} is off by {first.difference:.2e}, "
            f"more than {found.allowed(first):.2e} of what training changed in it, the limit by {first.yardstick.value}"
        )


def _settings(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What `FuncPipe.train` and `FuncPipe.start` take alike."""
    return {
        "epochs": options.epochs,
        "platform": options.platform,
        "like": options.like,
        "plan": plan,
        "seed": options.seed,
        "faults": fault_tolerance(options),
        "limits": run_limits(options),
        "settings": run_settings(options),
    }
