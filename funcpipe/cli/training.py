"""What is to be trained, and how, from what was said on the command line."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe.cli.factories import load_factory
from funcpipe.core import FaultTolerance, OnOutOfMemory, OptimizerKind, Plan, RunLimits, RunSettings, read
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe


def pipe_of(options: argparse.Namespace) -> "tuple[Plan, FuncPipe]":
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
    )


def faults_of(options: argparse.Namespace) -> FaultTolerance:
    """How the run copes with failures."""
    return FaultTolerance(
        checkpoint_steps=options.checkpoint,
        failure_interval_s=options.failure_interval,
        on_oom=OnOutOfMemory(options.on_oom),
    )


def limits_of(options: argparse.Namespace) -> RunLimits:
    """What the run may cost."""
    return RunLimits(max_usd=options.max_usd, deadline_s=options.deadline)


def settings_of(options: argparse.Namespace) -> RunSettings:
    """What the run is called, where its objects lie, and whose prices it is billed at."""
    return RunSettings(
        name=options.run_name,
        storage=options.storage,
        resume=options.resume,
        message_deadline_s=options.message_deadline,
        prices=load_spec(options.spec) if options.spec else None,
    )


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
