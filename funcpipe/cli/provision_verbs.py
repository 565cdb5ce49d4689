"""The verbs provision and fit-loss."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from funcpipe import show as render
from funcpipe.cli import plan_values
from funcpipe.cli.files import write_file
from funcpipe.cli.history_verbs import observed_here, with_observed
from funcpipe.cli.numbers import positive
from funcpipe.core import ModelProfile, OptimizerKind, ProvisionTable, TrainingSpec, read, to_text, write
from funcpipe.core.loss_model import InverseLoss, LossModel, WeightedLoss
from funcpipe.core.market import Market
from funcpipe.core.provision import JobSpec
from funcpipe.errors import FormatError, InputError
from funcpipe.platforms.machine_catalog import load_market

if TYPE_CHECKING:
    from rich.console import Console

    from funcpipe.neighbours.history.learned import ObservedIteration

N = TypeVar("N", int, float)


def provision(options: argparse.Namespace) -> None:
    """Print every way to do the job, and the one to take."""
    if options.target_loss is not None and options.loss_model is None:
        raise InputError("--target-loss needs --loss-model: fit one to a short run with funcpipe fit-loss")
    if options.loss_model is not None and options.target_loss is None:
        raise InputError("--loss-model is for --target-loss: give that, or leave the model out")
    profile = read(ModelProfile, options.profile)
    loss = None if options.loss_model is None else read_loss(options.loss_model)
    job = JobSpec(
        samples=options.samples,
        global_batch=options.global_batch,
        epochs=options.epochs,
        target_loss=options.target_loss,
        deadline_s=options.deadline,
        budget_usd=options.budget,
        miss_chance=options.miss_chance,
    )
    market = with_gpu_speeds(load_market(options.market), options.gpu_speed)
    spec = plan_values.platform_spec(options, profile)
    from funcpipe.neighbours.history.comparing import filed
    from funcpipe.neighbours.provisioning.compare import compare, fronts, provision_inputs

    inputs = provision_inputs(
        profile,
        job,
        spec=spec,
        market=market,
        loss=loss,
        training=TrainingSpec(global_batch=job.global_batch, optimizer=OptimizerKind(options.optimizer)),
        count_server=options.count_server,
    )
    table = filed(compare(inputs, None if options.ways is None else tuple(options.ways.split(","))))
    if options.figure:
        from funcpipe.neighbours.provisioning.compare import draw

        write_file(partial(draw, table, fronts(inputs, table)), options.figure)
    plans = [(one.way, one.plan) for one in table.provisions if one.plan is not None]
    observed = observed_here([plan for _, plan in plans])
    found = {way: here for (way, _), here in zip(plans, observed, strict=True) if here}
    render.show(options.json, with_observed(to_text(table), found), partial(_provisions, table, found))


def _provisions(table: ProvisionTable, found: "Mapping[str, Sequence[ObservedIteration]]", console: "Console") -> None:
    """All ways as modelled, and an iteration of those with a plan as observed here."""
    render.provisions(table, console)
    for way, observed in found.items():
        render.observed(observed, console, prefix=f"{way}, ")


def fit_loss(options: argparse.Namespace) -> None:
    """Fit a loss model and write it."""
    count = len(options.curves)
    workers = _each("--workers", options.workers, count, int)
    convergence = _each("--convergence", options.convergence, count, float)
    from funcpipe.neighbours.provisioning.fit_loss import file_curve, fit_inverse, fit_weighted, run_curve

    if options.storage is not None:
        if options.batch is not None:
            raise InputError("--batch is known from the runs themselves: leave it out with --storage")
        curves = [run_curve(name, storage=options.storage) for name in options.curves]
    else:
        if options.batch is None:
            raise InputError("--batch must say how many samples an iteration of the curves takes")
        batches = _each("--batch", options.batch, count, float)
        curves = [
            file_curve(path, batch=n, run=options.run_name) for path, n in zip(options.curves, batches, strict=True)
        ]
    curves = [
        replace(curve.after(options.skip), workers=n, convergence=x)
        for curve, n, x in zip(curves, workers, convergence, strict=True)
    ]
    if options.form == "inverse" and count > 1:
        raise InputError(f"--form inverse fits one curve, got {count}: give one, or take --form weighted")
    found: LossModel = (
        fit_inverse(curves[0], asynchronous=curves[0].workers > 1)
        if options.form == "inverse"
        else fit_weighted(curves, heterogeneity=any(x > 0 for x in convergence))
    )
    write_file(partial(write, found), options.output)
    first = curves[0]
    draw = partial(render.loss_model, found, options.output, options.target_loss, first.batch)
    render.show(options.json, to_text(found), draw)


def read_loss(path: str) -> LossModel:
    """The loss model in a file, of whichever form; raises FormatError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}; a loss model is written by `funcpipe fit-loss`") from error
    return read(WeightedLoss, path) if f'"{WeightedLoss.FORMAT}"' in text[:100] else read(InverseLoss, path)


def with_gpu_speeds(market: Market, speeds: list[str]) -> Market:
    """`market` with other speeds of GPUs, each given as GPU=VCPUS."""
    known = {gpu.name: gpu for gpu in market.gpus}
    for text in speeds:
        name, _, number = text.partition("=")
        try:
            value = positive(number)
        except argparse.ArgumentTypeError:
            raise InputError(f"--gpu-speed must read GPU=VCPUS, such as T4=40, got {text!r}") from None
        if name not in known:
            raise InputError(
                f"--gpu-speed names {name!r}; the market {market.name} has {', '.join(known) or 'no GPUs'}"
            )
        known[name] = replace(known[name], vcpu_equivalents=value)
    return replace(market, gpus=tuple(known.values()))


def _each(option: str, text: str, count: int, kind: Callable[[str], N]) -> list[N]:
    """The numbers of an option, as many as there are curves; one number stands for all."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} takes numbers, separated by commas, got {text!r}") from None
    if len(numbers) not in (1, count):
        raise InputError(f"{option} takes one number or {count}, as there are curves, got {len(numbers)}")
    return numbers * count if len(numbers) == 1 else numbers
