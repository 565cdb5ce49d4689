"""The values that training takes, from options."""

import argparse
import gc
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe.cli import as_before, is_program
from funcpipe.cli.factories import check_names, load_factory, make_model
from funcpipe.cli.provision_files import plan_in
from funcpipe.core import Coupled, FaultTolerance, OnDrift, OnOutOfMemory, OptimizerKind, Plan, RunLimits, RunSettings
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import LOCAL, is_deployment, load_spec, open_deployment

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe
    from funcpipe.training.averaging import EMA, Teacher


def checked_plan(options: argparse.Namespace) -> Plan:
    """The plan, for code of the user that is there; nothing is imported yet."""
    plan = plan_in(options.plan, options.way)
    check_names({"the model": options.model, "--data": options.data})
    check_names({} if options.loss == "own" else {"--loss": options.loss})
    check_names({"--optimizer": options.optimizer} if options.optimizer else {})
    return plan


def load_torch(platform: str) -> None:
    """Import torch and what trains with it; functions on this machine are forked from this command as it is then.

    Meanwhile the garbage collector rests: it would take a fifth of the time, and all that is loaded stays.
    """
    if "torch" in sys.modules or not is_program():
        return
    gc.disable()
    try:
        if platform == LOCAL:
            from funcpipe.client.prepare.site import fork_from_here

            fork_from_here(as_new=as_before)
        from funcpipe.worker.deferred_compiler import defer_compiler

        defer_compiler()
    finally:
        gc.enable()
        gc.freeze()


def model_with(options: argparse.Namespace, plan: Plan) -> "FuncPipe":
    """The model, with its loss and optimiser."""
    import torch

    from funcpipe.api import FuncPipe

    torch.manual_seed(options.seed)
    model = make_model(options.model)
    loss = None if options.loss == "own" else load_factory(options.loss)
    return FuncPipe(
        model,
        loss_fn=loss,
        optimizer=optimizer_of(options, plan.optimizer),
        clip_grad_norm=options.clip_grad_norm,
        clip_grad_value=options.clip_grad_value,
        scheduler=load_factory(options.scheduler) if options.scheduler else None,
        scheduler_interval=options.scheduler_interval,
        average=_average(options),
        teachers=teachers_of(options.teachers),
        precision=options.precision or plan.precision,
        on_nan=options.on_nan,
        coupled=options.coupled or (Coupled.CACHE if plan.joint_loss else Coupled.REFUSE),
        reduction=options.reduction,
        name=options.model,
        blocks=options.blocks,
    )


def fault_tolerance(options: argparse.Namespace) -> FaultTolerance:
    """The run's checkpoints, and its reaction to a function that runs out of memory."""
    return FaultTolerance(
        checkpoint_steps=options.checkpoint,
        failure_interval_s=options.failure_interval,
        on_oom=OnOutOfMemory(options.on_oom),
        on_drift=OnDrift(options.on_drift),
    )


def run_limits(options: argparse.Namespace) -> RunLimits:
    """The limits of the run's cost and time."""
    return RunLimits(max_usd=options.max_usd, deadline_s=options.deadline, allow_partial=options.yes)


def run_settings(options: argparse.Namespace) -> RunSettings:
    """The run's name, where it keeps its objects, and at whose prices it is billed."""
    if options.from_start and options.resume is None:
        raise InputError("--from-start says how to resume a run: give --resume RUN too, or leave it out")
    if options.take_over and options.resume is None and options.run_name is None:
        raise InputError("--take-over says what to do with a run that another command trains: give --resume RUN too")
    return RunSettings(
        name=options.run_name,
        storage=options.storage,
        resume=options.resume,
        message_deadline_s=options.message_deadline,
        prices=load_spec(options.spec) if options.spec else None,
        take_over=options.take_over,
        from_start=options.from_start,
        keep_model=options.keep_model,
        rehearse=options.rehearse,
    )


def storage_url(options: argparse.Namespace) -> str | None:
    """The URL of the run's objects, as `--storage` of other verbs takes it; None for a temporary folder."""
    if options.storage is not None or not is_deployment(options.platform):
        return str(options.storage) if options.storage is not None else None
    return open_deployment(options.platform).storage_urls.client


def _average(options: argparse.Namespace) -> "EMA | None":
    """The average that is to be kept; verify knows of none."""
    from funcpipe.training.averaging import EMA

    decay, output = getattr(options, "ema", None), getattr(options, "averaged_output", None)
    if output is not None and decay is None:
        raise InputError("--averaged-output writes averages, and none are kept; add --ema 0.999")
    return None if decay is None else EMA(decay=decay)


def teachers_of(options: Sequence[str]) -> "list[Teacher]":
    """The teachers that are given as STUDENT:TEACHER:DECAY."""
    from funcpipe.training.averaging import Teacher

    found = []
    for text in options:
        try:
            student, teacher, decay = text.split(":")
            found.append(Teacher(student=student, teacher=teacher, decay=float(decay)))
        except ValueError as error:
            raise InputError(f"--teacher {text}: give STUDENT:TEACHER:DECAY, such as student:teacher:0.996") from error
    return found


def optimizer_of(options: argparse.Namespace, kind: OptimizerKind) -> Any:
    """The optimiser factory that was named, or one of that kind."""
    import torch

    if options.optimizer:
        return load_factory(options.optimizer)
    match kind:
        case OptimizerKind.SGD:
            return partial(torch.optim.SGD, lr=options.lr)
        case OptimizerKind.MOMENTUM:
            return partial(torch.optim.SGD, lr=options.lr, momentum=0.9)
        case OptimizerKind.ADAM:
            return partial(torch.optim.Adam, lr=options.lr)
