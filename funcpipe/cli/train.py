"""The verbs train and verify."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show
from funcpipe.cli import training
from funcpipe.cli.estimate import confirm, dry_run
from funcpipe.cli.factories import check_names, load_data
from funcpipe.cli.files import check_holds, check_model_file, free_model_file, write_file, write_somewhere
from funcpipe.cli.options import FACTORY, Choice, Option, group, not_negative, option, positive, setting, whole
from funcpipe.cli.provision import plan_in, plan_or_way
from funcpipe.cli.server import SERVER, check_by_plan, train_around_server
from funcpipe.cli.verbs import Options, fields_of, verb
from funcpipe.core import Coupled, Plan, RunSettings, Validation, to_text, write_trace
from funcpipe.core.json_form import to_plain
from funcpipe.errors import Disagreement, InputError, InvalidValue
from funcpipe.platforms.catalog import LOCAL, is_deployment, open_deployment

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe
    from funcpipe.client.follow.callbacks import Callback
    from funcpipe.client.follow.results import RunResult
    from funcpipe.training.averaging import EMA


WAY = setting("plan.way NAME", "of the ways that --plan names, the one to take (default: the one recommended)")

_PLAN_AND_DATA = group(
    "plan and data",
    option(
        "--plan FILE",
        "plan written by `funcpipe optimize`, or ways that `funcpipe provision compare --json` has printed",
        needed=True,
        key="plan.file",
        reads=True,
    ),
    WAY,
    training.data("data.train"),
    training.BLOCKS,
)


def learning(optimizer: str, precision: str | None) -> list[Option]:
    """The options of how a model learns; `optimizer` and `precision` are what stands for them by default."""
    return [*training.learning(optimizer), training.TEACHERS, training.precision(precision), *_EXACTLY]


_EXACTLY = [
    setting(
        "training.on-nan",
        "when a loss or gradients are NaN or infinite, end the run, skip that step, or train on",
        Choice(("stop", "skip", "ignore")),
        "stop",
    ),
    setting(
        "training.reduction",
        "what the loss returns: a mean over samples, (sum, weight), or torch's mean over targets that are not ignored",
        Choice(("mean", "weighted", "tokens")),
        "mean",
    ),
    setting(
        "training.coupled",
        "when the loss of a batch is not the mean of its micro-batches' losses, start nothing, train on their "
        "mean as gradient accumulation does, or compute it once for the whole batch, by a plan made with "
        "plan.coupled=cache (default: cache for such a plan, else refuse)",
        Coupled,
    ),
    training.seed(),
]

_LEARNING = learning("the plan's kind, with --lr", None)

LENGTH = [
    option("--epochs N", "passes over the data", whole(), 1),
    setting("training.ema DECAY", "keep the exponential moving average of the parameters", positive),
]

VALIDATION = group(
    "validation",
    option(
        f"--validation-data {FACTORY}|URL",
        "factory or URL of a dataset to validate on, in eval mode, meanwhile",
        key="data.validation",
    ),
    training.METRICS,
    setting("training.validate-steps N", "validate every N steps", whole(), to="every_steps", one_of="validate"),
    setting(
        "training.validate-epochs N",
        "validate every N epochs (default: 1)",
        whole(),
        to="every_epochs",
        one_of="validate",
    ),
    setting("training.monitor NAME", "what decides the best validation: val_loss, or a metric", of=Validation),
    setting("training.monitor-mode", "whether the best is the smallest or the largest", of=Validation, to="mode"),
    setting("training.patience N", "end after N validations that are no better", whole()),
    setting("training.min-delta X", "differences up to X are no better", not_negative, of=Validation),
    setting("training.best FILE", "write the state_dict with the best validation, as with -o", writes=""),
)

RUN = group(
    "run",
    option("--run NAME", "name of the new run (default: a random one)", to="name", key="training.run"),
    option(
        "--resume RUN",
        "watch this run if it is still running; otherwise continue it from its newest checkpoint, "
        "by the same or another plan; `last` is the run that was begun last in this storage",
    ),
    option("--detach", "start the functions and return; --resume RUN collects the result"),
    option(
        "--take-over", "if another command trains the run, end that at a saved step, and continue the run here", key=""
    ),
    option(
        "--from-start",
        "with --resume, train again from the first step, with the parameters that were uploaded then",
        key="",
    ),
    setting(
        "training.keep-model",
        "with --storage or a deployment, keep the run's model when it has finished; otherwise delete the run",
        of=RunSettings,
    ),
    setting(
        "training.rehearsal",
        "train on one micro-batch here before anything starts, to find mistakes",
        of=RunSettings,
        to="rehearse",
    ),
    setting(
        "training.provisioned",
        "have the platform keep the run's functions ready, where it offers that and the run is cheaper so",
        of=RunSettings,
    ),
)

LIMITS = group(
    "limits: The run stops at a limit, and what it has saved can be resumed.",
    *training.LIMITS,
    option("--dry-run", "say what the job is expected to take and to cost, and start nothing", key=""),
    option(
        "--yes",
        "do not ask whether the expected cost is right, nor whether a limit will be reached before the last step",
        key="",
    ),
)

OUTPUT = group(
    "output",
    option(
        "--log KIND:WHERE ...",
        "log all steps to csv:FILE, tensorboard:FOLDER, mlflow:URI or wandb:PROJECT; can be given several times",
    ),
    option("--trace FILE", "write the events of the last steps, for `funcpipe report`", writes="trace"),
    option(
        "-o --output FILE",
        "write the trained state_dict: .safetensors, or .pt or .pth with torch.save (default: model.safetensors, or a "
        "name with a number; none with --storage, which keeps the model for `funcpipe run export`)",
        writes="",
    ),
    setting(
        "training.averaged-output FILE", "write the state_dict with the averages of training.ema, as with -o", writes=""
    ),
    setting("training.loss-output FILE", "write the state_dict of a loss that has parameters, as with -o", writes=""),
)


@verb(
    "funcpipe train funcpipe.examples.spirals:model --plan plan.json \\\n"
    "    --data funcpipe.examples.spirals:train_data --optimizer funcpipe.examples.spirals:optimizer --epochs 6",
    training.MODEL,
    _PLAN_AND_DATA,
    group("training", _LEARNING, LENGTH),
    VALIDATION,
    training.RUN_PLATFORM,
    training.LIKE,
    RUN,
    training.FAULTS,
    LIMITS,
    OUTPUT,
    SERVER,
    common=(
        *("--plan", "--data", "--loss", "--optimizer", "--lr", "--epochs", "--precision", "--validation-data"),
        *("--platform", "--storage", "--resume", "--detach", "--max-usd", "--dry-run", "--output"),
    ),
    table="training",
)
def train(options: Options) -> None:
    """Train a model on functions by a plan, or around a parameter server by a way that has no plan.

    The trained model is written to a file, unless the run keeps it in its storage and no file is wanted.
    """
    check_given(options)
    output, chosen = model_file(options), plan_or_way(options.plan, options.way)
    if chosen.plan is None:
        train_around_server(options, chosen)
        return
    plan = chosen.plan
    check_by_plan(options)
    training.check_code(options)
    if not options.dry_run:
        _precheck(options, plan, training.run_of(options)["settings"])
    training.load_torch(options.platform)
    train_by(options, plan, model_with(options, plan), output)


def train_by(options: Options, plan: Plan, pipe: "FuncPipe", output: str | None) -> None:
    """Train the model by `plan` as the options say, or only say what that would take; write it to `output`."""
    validation = validation_of(options)
    if output is not None:
        check_holds(output, pipe.model.state_dict())
    if options.dry_run:
        dry_run(options, plan, pipe, validation)
        return
    settings: dict[str, Any] = {**training.run_of(options), "epochs": options.epochs, "plan": plan}
    settings |= {"validation": validation, "confirm": partial(confirm, options, plan)}
    if options.detach:
        run = pipe.start(load_data(options.data), **settings)
        show.show(options.json, show.as_json({"run": run}), partial(show.detached, run, storage_url(options)))
        return
    given = callbacks(options.log, quiet=options.json or options.quiet)
    result = pipe.train(load_data(options.data), **settings, callbacks=given, progress=False)
    written = _write(result, output, options)
    summary: dict[str, Any] = {"run": result.run, "losses": result.losses, "cost_usd": result.bill.cost_usd}
    summary |= {"bill": to_plain(result.bill), "trace": options.trace, "model": output}
    summary["skipped_steps"] = result.skipped_steps
    if result.validations:
        summary["validations"] = [{"step": report.step, **report.values} for report in result.validations]
        summary["best_step"] = result.best_step
    keeps = options.keep_model and (options.storage is not None or is_deployment(options.platform))
    kept_in = storage_url(options) if keeps else None
    draw = partial(show.training_result, result, plan.estimate, written, kept_in)
    show.show(options.json, show.as_json(summary), draw)


@verb(
    "funcpipe verify funcpipe.examples.spirals:model --plan plan.json \\\n"
    "    --data funcpipe.examples.spirals:train_data",
    training.MODEL,
    _PLAN_AND_DATA,
    group("training", _LEARNING),
    group(
        "comparison",
        option("--steps N", "steps to train", whole(), 3),
        option(
            "--tolerance SHARE",
            "difference, as a share of what training changed, that counts as rounding",
            positive,
            1e-4,
        ),
    ),
    group("fault tolerance", training.MESSAGE_DEADLINE),
    table="training",
)
def verify(options: Options) -> None:
    """Train a few steps on local functions and in one process, and compare every tensor."""
    plan = checked_plan(options)
    training.load_torch(LOCAL)
    pipe = model_with(options, plan)
    found = pipe.verify(
        load_data(options.data),
        steps=options.steps,
        plan=plan,
        seed=options.seed,
        tolerance=options.tolerance,
        message_deadline_s=options.message_deadline_s,
    )
    show.show(options.json, to_text(found), partial(show.verification, found))
    first = found.first_difference
    if first is not None:
        raise Disagreement(
            f"the first layer that differs is {first.layer}: {first.name} is off by {first.difference:.2e}, "
            f"more than {found.allowed(first):.2e} of what training changed in it, the limit by {first.yardstick.value}"
        )


def checked_plan(options: Options) -> Plan:
    """The plan, for code of the user that is there; nothing is imported yet."""
    plan = plan_in(options.plan, options.way)
    training.check_code(options)
    return plan


def model_with(options: Options, plan: Plan) -> "FuncPipe":
    """The model, with its loss and optimiser."""
    return training.pipe_of(
        options,
        optimizer=training.optimizer_of(options, plan.optimizer),
        average=average_of(options),
        precision=options.precision or plan.precision,
        coupled=options.coupled or (Coupled.CACHE if plan.joint_loss else Coupled.REFUSE),
    )


def storage_url(options: Options) -> str | None:
    """The URL of the run's objects, as `--storage` of other verbs takes it; None for a temporary folder."""
    if options.storage is not None or not is_deployment(options.platform):
        return str(options.storage) if options.storage is not None else None
    return open_deployment(options.platform).storage_urls.client


def callbacks(logs: Sequence[str], *, quiet: bool) -> "list[Callback]":
    """A progress bar unless it is to be `quiet`, and the loggers that `logs` name. Raises InputError."""
    from funcpipe import loggers

    kinds = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "mlflow": "MLflowLogger", "wandb": "WandbLogger"}
    found: list[Callback] = [] if quiet else [loggers.ProgressBar()]
    for text in logs:
        kind, _, where = text.partition(":")
        if kind not in kinds or not where:
            known = ", ".join(f"{name}:…" for name in kinds)
            raise InputError(f"--log must be one of {known}, such as csv:losses.csv, got {text!r}")
        found.append(getattr(loggers, kinds[kind])(where))
    return found


def _precheck(options: Options, plan: Plan, settings: RunSettings) -> None:
    """Make the checks that do not need torch; of a deployment that is opened later, only if the run has a name."""
    from funcpipe.client.prepare.precheck import precheck, with_last
    from funcpipe.client.prepare.session import open_session

    if not is_deployment(options.platform) or settings.name or settings.resume:
        with open_session(options.platform, options.like, settings, detached=options.detach) as session:
            precheck(session, plan, with_last(session.storage, settings))


def _write(result: "RunResult", output: str | None, options: Options) -> dict[str, str | None]:
    """Write the files that are wanted of a run; returns their paths by content."""
    if options.trace:
        write_file(partial(write_trace, result.trace), options.trace)
    if output is not None:
        write_somewhere(result.state_dict(), output, result.run)
    if options.averaged_output:
        write_somewhere(result.averaged_state_dict(), options.averaged_output, f"{result.run}-averaged")
    if options.best:
        write_somewhere(result.best_state_dict(), options.best, f"{result.run}-best")
    if options.loss_output:
        write_somewhere(result.loss_state_dict(), options.loss_output, f"{result.run}-loss")
    averaged, best, loss = options.averaged_output, options.best, options.loss_output
    return {"trace": options.trace, "model": output, "averaged": averaged, "best": best, "loss": loss}


def model_file(options: Options) -> str | None:
    """The file for the trained model: the one that was named, or a default where it would be lost otherwise.

    In a deployment's own storage it would be: objects expire there.
    """
    for path in (options.averaged_output, options.best, options.loss_output, options.output):
        check_model_file(path)
    if options.detach or options.output is not None or (options.keep_model and options.storage is not None):
        return str(options.output) if options.output is not None else None
    return free_model_file()


def average_of(options: Options) -> "EMA | None":
    """The average that is to be kept; verify knows of none."""
    from funcpipe.training.averaging import EMA

    decay, output = getattr(options, "ema", None), getattr(options, "averaged_output", None)
    if output is not None and decay is None:
        raise InputError("training.averaged-output is for averages, and none are kept: --set training.ema=0.999")
    return None if decay is None else EMA(decay=decay)


def check_given(options: Options) -> None:
    """Raise InvalidValue for options of a validation without its data, InputError for data that is not there, and for
    what says how to go on with a run, without one.
    """
    if options.from_start and options.resume is None:
        raise InputError("--from-start says how to resume a run: give --resume RUN too, or leave it out")
    if options.take_over and options.resume is None and options.name is None:
        raise InputError("--take-over says what to do with a run that another command trains: give --resume RUN too")
    if options.validation_data is not None:
        check_names({"--validation-data": options.validation_data})
        return
    given = {"--metric": options.metrics, "training.patience": options.patience, "training.best": options.best}
    given |= {"training.validate-steps": options.every_steps, "training.validate-epochs": options.every_epochs}
    for name, value in given.items():
        if value:
            raise InvalidValue(name, value, "needs a dataset to validate on: --validation-data MODULE:FACTORY")


def validation_of(options: Options) -> Validation | None:
    """The validation of `train`, if there is one."""
    if options.validation_data is None:
        return None
    given = {"data": load_data(options.validation_data), "metrics": training.metrics_of(options)}
    return Validation(**{**fields_of(Validation, options), **given})
