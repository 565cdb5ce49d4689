"""The verbs provision compare and provision fit-loss, and the files of the first as other verbs read them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from funcpipe import show
from funcpipe.cli.files import write_file
from funcpipe.cli.measure import PROFILE, planned_platform
from funcpipe.cli.options import Choice, argument, group, not_negative, number, option, positive, setting, whole
from funcpipe.cli.report import observed_here, with_observed
from funcpipe.cli.verbs import Options, fields_of, verb
from funcpipe.core import ModelProfile, OptimizerKind, Plan, ProvisionTable, TrainingSpec, read, to_text, write
from funcpipe.core.loss_model import InverseLoss, LossModel, WeightedLoss
from funcpipe.core.market import Market
from funcpipe.core.provision import JobSpec, Provision
from funcpipe.errors import FormatError, InputError
from funcpipe.platforms.catalog import load_market, load_spec

N = TypeVar("N", int, float)


@verb(
    "funcpipe provision compare profile.json --samples 50000 --global-batch 64 --epochs 3 --deadline 3600",
    PROFILE,
    group(
        "job",
        option("--samples N", "samples of the dataset", whole(), needed=True),
        option("--global-batch N", "samples of an update", whole(), needed=True),
        option("--epochs N", "train so many epochs", positive, one_of="goal"),
        option("--target-loss X", "train until the loss is X; needs --loss-model", number(), one_of="goal"),
        option("--loss-model FILE", "how the loss falls, written by `funcpipe provision fit-loss`", reads=True),
        option("--deadline SECONDS", "when the whole job must be done", positive, to="deadline_s"),
        option("--max-usd USD", "what the whole job may cost", positive, to="budget_usd"),
        setting("provision.miss-chance P", "how likely the deadline may be missed", not_negative, of=JobSpec),
        option("--optimizer", "the optimiser", OptimizerKind, OptimizerKind.SGD),
    ),
    group(
        "market",
        planned_platform(),
        option("--market NAME|FILE", "the machines: aws, aliyun, or a file", None, "aws", key="platform.market"),
        setting(
            "provision.gpu-speed GPU=VCPUS ...",
            "this model of GPU computes like so many vCPUs, such as T4=40; may be repeated",
        ),
    ),
    group(
        "search",
        option("--ways WAY,WAY", "only these ways; docs/provisioning.md lists them"),
        setting("provision.count-server", "let lambdadnn and spotdnn count the server while they search"),
        option("--figure FILE", "draw dollars over time of all ways (needs matplotlib)", writes=""),
    ),
)
def compare(options: Options) -> None:
    """Print every way to do the job, and the one to take."""
    if options.epochs is None and options.target_loss is None:
        raise InputError("one of the arguments --epochs --target-loss is required")
    if options.target_loss is not None and options.loss_model is None:
        raise InputError("--target-loss needs --loss-model: fit one to a short run with funcpipe provision fit-loss")
    if options.loss_model is not None and options.target_loss is None:
        raise InputError("--loss-model is for --target-loss: give that, or leave the model out")
    profile = read(ModelProfile, options.profile)
    loss = None if options.loss_model is None else _read_loss(options.loss_model)
    job = JobSpec(**fields_of(JobSpec, options))
    spec = load_spec(options.spec or options.platform or profile.platform)
    from funcpipe.neighbours.history.filing import filed
    from funcpipe.neighbours.provisioning.compare import compare as ways_of
    from funcpipe.neighbours.provisioning.compare import fronts, provision_inputs
    from funcpipe.neighbours.provisioning.workload import at_roofline

    market = _with_gpu_speeds(at_roofline(load_market(options.market), profile, spec), options.gpu_speed)
    inputs = provision_inputs(
        profile,
        job,
        spec=spec,
        market=market,
        loss=loss,
        training=TrainingSpec(global_batch=job.global_batch, optimizer=options.optimizer),
        count_server=options.count_server,
    )
    table = filed(ways_of(inputs, None if options.ways is None else tuple(options.ways.split(","))))
    if options.figure:
        from funcpipe.neighbours.provisioning.compare import draw

        write_file(partial(draw, table, fronts(inputs, table)), options.figure)
    plans = [(one.way, one.plan) for one in table.provisions if one.plan is not None]
    observed = observed_here([plan for _, plan in plans])
    found = {way: here for (way, _), here in zip(plans, observed, strict=True) if here}
    draws = [partial(show.observed, here, prefix=f"{way}, ") for way, here in found.items()]
    show.show(options.json, with_observed(to_text(table), found), partial(show.provisions, table), *draws)


@verb(
    "funcpipe provision fit-loss losses.csv --batch 64 -o loss.json",
    argument(
        "CURVE ...",
        "losses by step: a .csv as CSVLogger writes it, a .json, or with --storage the name of a run",
        "curves",
    ),
    group(
        "curves",
        option("--storage URL", "where runs keep their objects: the curves are runs in it"),
        option("--run RUN", "which run of a CSV file with several", to="run_of", key=""),
        option("--batch N,N", "samples of an iteration, one number or one for each curve"),
        setting("provision.workers N,N", "asynchronous workers of the curves, as with --batch", None, "1"),
        setting("provision.convergence X,X", "their convergence coefficients, as with --batch", None, "0"),
        setting("provision.skip N", "leave out the first N steps of each curve (default: a tenth of them)", whole(0)),
    ),
    group(
        "model",
        option(
            "--form",
            "inverse: scale/steps + floor; weighted: equation (3) of spotDNN, which needs several batches",
            Choice(("inverse", "weighted")),
            "inverse",
        ),
        option("--target-loss X", "say how long this loss takes", number()),
    ),
    group("output", option("-o --output FILE", "write the loss model here", None, "loss.json", writes="")),
)
def fit_loss(options: Options) -> None:
    """Fit a loss model and write it."""
    count = len(options.curves)
    workers = _each("provision.workers", options.workers, count, int)
    convergence = _each("provision.convergence", options.convergence, count, float)
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
            file_curve(path, batch=n, run=options.run_of) for path, n in zip(options.curves, batches, strict=True)
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
    draw = partial(show.loss_model, found, options.output, options.target_loss, first.batch)
    show.show(options.json, to_text(found), draw)


def _read_loss(path: str) -> LossModel:
    """The loss model in a file, of whichever form; raises FormatError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "a loss model is written by `funcpipe provision fit-loss`"
        raise FormatError(f"{path}: cannot be read: {error}; {hint}") from error
    return read(WeightedLoss, path) if f'"{WeightedLoss.FORMAT}"' in text[:100] else read(InverseLoss, path)


def _with_gpu_speeds(market: Market, speeds: list[str]) -> Market:
    """`market` with other speeds of GPUs, each given as GPU=VCPUS."""
    known = {gpu.name: gpu for gpu in market.gpus}
    for text in speeds:
        name, _, number = text.partition("=")
        try:
            value = positive(number)
        except ValueError:
            raise InputError(f"provision.gpu-speed must read GPU=VCPUS, such as T4=40, got {text!r}") from None
        if name not in known:
            raise InputError(
                f"provision.gpu-speed names {name!r}; the market {market.name} has {', '.join(known) or 'no GPUs'}"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrWay:
    """What to train by: a plan, or a way of a comparison that may have one.

    A way comes with its market, and with the global batch of the job that it was chosen for, where that is known.
    """

    plan: Plan | None
    way: Provision | None = None
    market: str = "aws"
    global_batch: int | None = None


def chosen_way(path: str, way: str | None) -> PlanOrWay:
    """The provision in a file, or the way of a table that was recommended or named.

    Raises InputError or FormatError.
    """
    if _is_table(path):
        table = read(ProvisionTable, path)
        name = way or table.recommended
        if name is None:
            raise InputError(f"no way in {path} does the job: {table.why}")
        found = {each.way: each for each in table.provisions}
        if name not in found:
            raise InputError(f"plan.way must be one of {', '.join(found)}, as in {path}, got {name!r}")
        one = found[name]
        return PlanOrWay(plan=one.plan, way=one, market=table.market, global_batch=table.job.global_batch)
    alone = read(Provision, path)
    if way not in (None, alone.way):
        raise InputError(f"{path} has one way, {alone.way}, and plan.way names {way}")
    return PlanOrWay(plan=alone.plan, way=alone)


def plan_or_way(path: str, way: str | None) -> PlanOrWay:
    """The plan in a file, or a way that `provision compare --json` has printed, as `chosen_way` finds it.

    Raises InputError or FormatError.
    """
    if os.path.exists(path) and (_is_table(path) or _is_of(Provision.FORMAT, path)):
        return chosen_way(path, way)
    if way is not None:
        raise InputError(
            f"plan.way names {way}, but {path} has no ways: leave it out, or give as --plan what "
            "`funcpipe provision compare --json` has printed"
        )
    return PlanOrWay(plan=read(Plan, path))


def plan_in(path: str, way: str | None) -> Plan:
    """The plan in a file, or that of a way. Raises InputError, for a way without a plan too, or FormatError."""
    found = plan_or_way(path, way)
    if found.plan is None:
        assert found.way is not None, "it is a plan otherwise"
        raise InputError(
            f"the way {found.way.way} has no plan: only `funcpipe train` trains by it; or take the way funcpipe, with "
            "--set plan.way=funcpipe"
        )
    return found.plan


def _is_table(path: str) -> bool:
    return _is_of(ProvisionTable.FORMAT, path)


def _is_of(form: str, path: str) -> bool:
    try:
        return f'"{form}"' in Path(path).read_text(encoding="utf-8")[:100]
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}; `funcpipe provision compare --json` prints it") from error
