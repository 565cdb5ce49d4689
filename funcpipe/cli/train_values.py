"""From options to the values that training takes."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe.cli.factories import load_factory
from funcpipe.core import FaultTolerance, OnDrift, OnOutOfMemory, OptimizerKind, Plan, RunLimits, RunSettings, read
from funcpipe.platforms.catalog import LOCAL, load_spec, open_deployment

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe


def plan_and_model(options: argparse.Namespace) -> "tuple[Plan, FuncPipe]":
    """The plan, and the model with its loss and optimiser."""
    import torch

    from funcpipe.api import FuncPipe

    plan = read(Plan, options.plan)
    torch.manual_seed(options.seed)
    model = load_factory(options.model)()
    loss = None if options.loss == "own" else load_factory(options.loss)
    return plan, FuncPipe(
        model,
        loss_fn=loss,
        optimizer=_optimizer(options, plan),
        clip_grad_norm=options.clip_grad_norm,
        name=options.model,
        blocks=options.blocks,
    )


def fault_tolerance(options: argparse.Namespace) -> FaultTolerance:
    """When the run saves checkpoints, and what follows when a function runs out of memory."""
    return FaultTolerance(
        checkpoint_steps=options.checkpoint,
        failure_interval_s=options.failure_interval,
        on_oom=OnOutOfMemory(options.on_oom),
        on_drift=OnDrift(options.on_drift),
    )


def run_limits(options: argparse.Namespace) -> RunLimits:
    """What the run may cost, and how long it may take."""
    return RunLimits(max_usd=options.max_usd, deadline_s=options.deadline)


def run_settings(options: argparse.Namespace) -> RunSettings:
    """The run's name, where it keeps its objects, and at whose prices it is billed."""
    return RunSettings(
        name=options.run_name,
        storage=options.storage,
        resume=options.resume,
        message_deadline_s=options.message_deadline,
        prices=load_spec(options.spec) if options.spec else None,
        take_over=options.take_over,
        from_start=options.from_start,
    )


def storage_url(options: argparse.Namespace) -> str | None:
    """Where the run keeps its objects, as `--storage` of other verbs takes it; None for a temporary folder."""
    if options.storage is not None or options.platform == LOCAL:
        return str(options.storage) if options.storage is not None else None
    return open_deployment(options.platform).storage_urls.client


def _optimizer(options: argparse.Namespace, plan: Plan) -> Any:
    """The optimiser factory that was named, or the plan's kind of optimiser."""
    import torch

    if options.optimizer:
        return load_factory(options.optimizer)
    match plan.optimizer:
        case OptimizerKind.SGD:
            return partial(torch.optim.SGD, lr=options.lr)
        case OptimizerKind.MOMENTUM:
            return partial(torch.optim.SGD, lr=options.lr, momentum=0.9)
        case OptimizerKind.ADAM:
            return partial(torch.optim.Adam, lr=options.lr)
