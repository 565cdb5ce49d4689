"""The verbs evaluate and predict."""

from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show
from funcpipe.cli import training
from funcpipe.cli.factories import load_data
from funcpipe.cli.files import write_file
from funcpipe.cli.options import Option, group, option
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import Plan, read

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe


def _plan_and_data(key: str) -> list[Option]:
    weights = "a state_dict of the model, as `funcpipe train -o` writes it"
    return group(
        "plan and data",
        option("--plan FILE", "plan written by `funcpipe optimize`", needed=True, key="plan.file", reads=True),
        training.data(key),
        option("--weights FILE", weights, reads=True),
        training.BLOCKS,
    )


_HOW = [
    training.seed_setting("the model, where no weights are given"),
    training.rare_precision(),
    *training.RUN_PLATFORM,
    training.LIKE_SETTING,
    option("--run NAME", "name of the run (default: a random one)", to="name"),
    *training.FAULTS,
    *group(
        "limits",
        training.RARE_LIMITS,
        option("--yes", "start though a limit is expected to be reached before the last sample"),
    ),
]


@verb(
    "funcpipe evaluate funcpipe.examples.spirals:model --plan plan.json \\\n"
    "    --data funcpipe.examples.spirals:train_data --weights spirals.pt",
    training.MODEL,
    _plan_and_data("data.validation"),
    group("evaluation", training.LOSS, training.METRICS),
    _HOW,
)
def evaluate(options: Options) -> None:
    """Measure a model in eval mode."""
    pipe, settings = _pipe(options)
    found = pipe.evaluate(load_data(options.data), metrics=training.metrics_of(options), **settings)
    values = {"loss": found.loss, **found.metrics}
    summary = {"run": found.run, "samples": found.samples, **values, "cost_usd": found.bill.cost_usd}
    show.show(options.json, show.as_json(summary), partial(show.evaluation, found))


@verb(
    "funcpipe predict funcpipe.examples.spirals:model --plan plan.json \\\n"
    "    --data funcpipe.examples.spirals:train_data --weights spirals.pt -o outputs.safetensors",
    training.MODEL,
    _plan_and_data(""),
    group(
        "evaluation",
        option("-o --output FILE", "write the outputs by name, as a safetensors file", needed=True, writes=""),
    ),
    _HOW,
)
def predict(options: Options) -> None:
    """Write the outputs of a model in eval mode."""
    from safetensors.torch import save_file

    pipe, settings = _pipe(options)
    outputs = pipe.predict(load_data(options.data), **settings)
    write_file(partial(save_file, {name: tensor.contiguous() for name, tensor in outputs.items()}), options.output)
    shapes = {name: list(tensor.shape) for name, tensor in outputs.items()}
    summary = {"output": options.output, "shapes": shapes}
    show.show(options.json, show.as_json(summary), partial(show.predictions, shapes, options.output))


def _pipe(options: Options) -> "tuple[FuncPipe, dict[str, Any]]":
    """The model, and the common arguments of `evaluate` and `predict`."""
    plan = read(Plan, options.plan)
    training.check_code(options)
    training.load_torch(options.platform)
    settings = {**training.run_of(options), "plan": plan}
    return training.pipe_of(options, precision=options.precision or plan.precision), settings
