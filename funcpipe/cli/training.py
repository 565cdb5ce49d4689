"""Training as options say it: the options that several verbs share, and the values made from them."""

import gc
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe.cli import as_before, is_program
from funcpipe.cli.factories import check_names, load_factory, make_model
from funcpipe.cli.files import SAFETENSORS
from funcpipe.cli.options import FACTORY, Option, Setting, argument, group, option, positive, setting, whole
from funcpipe.cli.verbs import Options, fields_of
from funcpipe.core import FaultTolerance, Interval, OptimizerKind, Precision, RunLimits, RunSettings
from funcpipe.errors import InputError, InvalidValue
from funcpipe.platforms.catalog import LOCAL, load_spec

if TYPE_CHECKING:
    from torch import nn

    from funcpipe.api import FuncPipe
    from funcpipe.training.averaging import Teacher

OPTIMIZERS = tuple(kind.value for kind in OptimizerKind)
"""The optimisers that have a name."""

_SEED = whole(0, 2**63 - 1)

MODEL = argument(FACTORY, "factory that returns the model, an nn.Module", "model", key="model.factory")

BLOCKS = setting(
    "model.block PATH ...",
    "make the module at this path one layer, whatever is inside; may be given several times",
    to="blocks",
)

LOSS = option(
    "--loss MODULE:FUNCTION",
    "loss of output and target, or `own` if the model's output has a `loss`",
    None,
    "torch.nn.functional:cross_entropy",
    key="training.loss",
)

METRICS = option(
    "--metric NAME=MODULE:FACTORY ...",
    "a metric of torchmetrics or evaluate, a factory of one, or a function of output and target; may be repeated",
    to="metrics",
    key="training.metric",
)

TEACHERS = setting(
    "model.teacher STUDENT:TEACHER:DECAY ...",
    "after each step let the module at the path TEACHER become DECAY of itself and 1 - DECAY of the one at "
    "STUDENT; may be given several times; give the same to profile and to train",
    to="teachers",
)


_PRECISION = "compute in this format under autocast, with parameters in fp32"


def precision(default: str | None) -> Option:
    """The option of the precision."""
    text = _PRECISION if default else f"{_PRECISION} (default: the plan's)"
    return option("--precision {fp32,bf16,fp16}", text, _precision, default)


def _precision(text: str) -> Precision:
    try:
        return Precision.named(text)
    except InvalidValue as error:
        raise ValueError(f"{error.rule}, got {text!r}") from None


def learning(optimizer: str) -> list[Option]:
    """The options of the loss, the scheduler and the gradient; `optimizer` is what that option says of its default."""
    return [
        LOSS,
        option(
            f"--optimizer NAME|{FACTORY}",
            f"sgd, momentum or adam, with --lr; or a factory that takes the parameters (default: {optimizer})",
        ),
        option("--lr RATE", "learning rate where --optimizer is no factory", positive, 0.01),
        setting(
            f"training.scheduler {FACTORY}", "factory that takes the optimiser and returns a learning-rate scheduler"
        ),
        setting("training.scheduler-interval", "when it is stepped", Interval, Interval.EPOCH),
        setting("training.clip-grad-norm NORM", "clip the norm of the whole model's gradient", positive),
        setting("training.clip-grad-value VALUE", "clip each element of the gradient to this size", positive),
    ]


_SEED_OF_TRAINING = "the weights, the order of the data and dropout"


def seed(of: str = _SEED_OF_TRAINING) -> Option:
    """The option of the seed."""
    return option("--seed N", f"seed of {of}", _SEED, 0, key="training.seed")


def seed_setting(of: str = _SEED_OF_TRAINING) -> Setting:
    """The seed, where it is wanted rarely."""
    return setting("training.seed N", f"seed of {of}", _SEED, 0)


_DEADLINE = "stop before the run takes longer than this"

MAX_USD = option("--max-usd USD", "stop before the run costs more than this", positive)

LIMITS = [MAX_USD, option("--deadline SECONDS", _DEADLINE, positive, to="deadline_s")]

RARE_LIMITS = [MAX_USD, setting("training.deadline SECONDS", _DEADLINE, positive, to="deadline_s")]


def data(key: str) -> Option:
    """The option of the dataset, with its key in the job file."""
    text = "factory that returns the dataset, called in the functions; or the URL of one, as s3://bucket/prefix"
    return option(f"--data {FACTORY}|URL", text, needed=True, key=key)


def rare_precision() -> Setting:
    """The precision, where it is wanted rarely."""
    return setting("training.precision {fp32,bf16,fp16}", f"{_PRECISION} (default: the plan's)", _precision)


_LIKE = "give local functions the memory, processors, links and lifetime of this platform"

RUN_PLATFORM = group(
    "platform",
    option(
        "--platform PLATFORM",
        "where functions run: `local` for processes of this machine, `ray://…` for Ray, or a "
        "deployment's URL, such as aws-lambda://funcpipe?region=eu-central-1",
        None,
        LOCAL,
        key="platform.run-on",
    ),
    option(
        "--storage URL",
        "where the run keeps its objects, such as file:///tmp/runs, s3://bucket/prefix or redis://host/0 "
        "(default: a temporary folder, or the deployment's own storage). For a plan with several stores: "
        "default=URL,messages=URL,sums=URL,checkpoints=URL",
        key="platform.storage",
    ),
    setting(
        "platform.spec FILE", "platform specification to price the bill with (default: the plan's platform)", reads=True
    ),
)

LIKE = group("platform", option("--like NAME", _LIKE, key="platform.like"))

LIKE_SETTING = setting("platform.like NAME", _LIKE)

MESSAGE_DEADLINE = setting(
    "training.message-deadline SECONDS",
    "end the run when a worker has waited this long for a message",
    positive,
    of=RunSettings,
    to="message_deadline_s",
)

FAULTS = group(
    "fault tolerance",
    setting(
        "training.checkpoint N",
        "save a checkpoint every N steps (default: an interval that suits the measured times)",
        whole(),
        to="checkpoint_steps",
    ),
    setting(
        "training.failure-interval SECONDS",
        "expected time between failures of a function, from which the checkpoint interval follows",
        positive,
        of=FaultTolerance,
        to="failure_interval_s",
    ),
    setting(
        "training.on-oom",
        "when a function runs out of memory, end the run or continue with larger functions",
        of=FaultTolerance,
    ),
    setting(
        "training.on-drift",
        "when replicas come to differ, as on unlike processors, copy the parameters of the first or end the run",
        of=FaultTolerance,
    ),
    MESSAGE_DEADLINE,
)


def check_code(options: Options) -> None:
    """Raise InputError for code of the user that is not there; nothing is imported yet."""
    given = {"the model": options.model, "--data": options.data}
    if getattr(options, "loss", "own") != "own":
        given["--loss"] = options.loss
    if getattr(options, "optimizer", None) and options.optimizer not in OPTIMIZERS:
        given["--optimizer"] = options.optimizer
    check_names(given)


def load_torch(platform: str) -> None:
    """Import torch and what trains with it; functions on this machine are forked from this command as it is then.

    Meanwhile the garbage collector rests: it would take a fifth of the time, and all that is loaded stays.
    """
    if "torch" in sys.modules or not is_program():
        return
    gc.disable()
    try:
        if platform == LOCAL:
            from funcpipe.client.prepare.session import fork_from_here

            fork_from_here(as_new=as_before)
        from funcpipe.worker.deferred_compiler import defer_compiler

        defer_compiler()
    finally:
        gc.enable()
        gc.freeze()


def pipe_of(options: Options, **settings: Any) -> "FuncPipe":
    """The model with its loss, and with what `settings`, or else options, say of the keywords of `FuncPipe`."""
    import torch

    from funcpipe.api import FuncPipe
    from funcpipe.training.recipe import RecipeKeywords

    if hasattr(options, "seed"):
        torch.manual_seed(options.seed)
    model = make_model(options.model)
    if getattr(options, "weights", None):
        _load_weights(model, options.weights)
    given = {name: getattr(options, name) for name in RecipeKeywords.__annotations__ if hasattr(options, name)}
    if "loss_fn" not in settings and getattr(options, "loss", "own") != "own":
        given["loss_fn"] = load_factory(options.loss)
    if getattr(options, "scheduler", None):
        given["scheduler"] = load_factory(options.scheduler)
    if hasattr(options, "teachers"):
        given["teachers"] = teachers_of(options.teachers)
    return FuncPipe(model, name=options.model, blocks=options.blocks, **{**given, **settings})


def _load_weights(model: "nn.Module", path: str) -> None:
    """Read a state_dict as `funcpipe train -o` writes it. Raises InputError if it is none of `model`."""
    import safetensors.torch
    import torch

    try:
        if path.endswith(SAFETENSORS):
            model.load_state_dict(safetensors.torch.load_file(path))
        else:
            model.load_state_dict(torch.load(path, weights_only=True))
    except Exception as error:
        raise InputError(f"--weights: {path} is no state_dict of the model: {error}") from error


def run_of(options: Options) -> dict[str, Any]:
    """The keywords of `FuncPipe.train`, `start`, `evaluate` and `predict` that say where and how a run goes."""
    prices = load_spec(options.spec) if options.spec else None
    return {
        "platform": options.platform,
        "like": options.like,
        "seed": options.seed,
        "faults": FaultTolerance(**fields_of(FaultTolerance, options)),
        "limits": limits_of(options),
        "settings": RunSettings(**fields_of(RunSettings, options), prices=prices),
    }


def limits_of(options: Options) -> RunLimits:
    """The limits of the run's cost and time."""
    return RunLimits(**fields_of(RunLimits, options), allow_partial=options.yes)


def metrics_of(options: Options) -> dict[str, Any]:
    """The metrics that were named, as NAME=MODULE:FACTORY."""
    found = {}
    for text in options.metrics:
        name, equals, factory = text.partition("=")
        if not equals:
            raise InvalidValue("--metric", text, "must read NAME=MODULE:FACTORY")
        found[name] = load_factory(factory)
    return found


def teachers_of(options: Sequence[str]) -> "list[Teacher]":
    """The teachers that are given as STUDENT:TEACHER:DECAY."""
    from funcpipe.training.averaging import Teacher

    found = []
    for text in options:
        try:
            student, teacher, decay = text.split(":")
            found.append(Teacher(student=student, teacher=teacher, decay=float(decay)))
        except ValueError as error:
            raise InputError(
                f"--set model.teacher={text}: give STUDENT:TEACHER:DECAY, such as student:teacher:0.996"
            ) from error
    return found


def optimizer_of(options: Options, kind: OptimizerKind) -> Any:
    """The optimiser factory that was named, or one of that kind."""
    import torch

    if options.optimizer and options.optimizer not in OPTIMIZERS:
        return load_factory(options.optimizer)
    match OptimizerKind(options.optimizer or kind):
        case OptimizerKind.SGD:
            return partial(torch.optim.SGD, lr=options.lr)
        case OptimizerKind.MOMENTUM:
            return partial(torch.optim.SGD, lr=options.lr, momentum=0.9)
        case OptimizerKind.ADAM:
            return partial(torch.optim.Adam, lr=options.lr)
