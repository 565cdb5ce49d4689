"""The verbs evaluate and predict."""

from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show as render
from funcpipe.cli.factories import load_data
from funcpipe.cli.files import write_file
from funcpipe.cli.options import Option, Options, group, option, verb
from funcpipe.cli.training import (
    DATA,
    MODEL,
    blocks,
    check_code,
    data,
    fault_options,
    limits,
    load_torch,
    loss,
    metrics,
    metrics_of,
    pipe_of,
    precision,
    run_of,
    run_platform,
    seed,
)
from funcpipe.core import Plan, read

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe


def _plan_and_data(key: str) -> list[Option]:
    weights = "a state_dict of the model, as `funcpipe train -o` writes it"
    return group(
        "plan and data",
        option("--plan FILE", "plan written by `funcpipe optimize`", needed=True, key="plan.file", reads=True),
        data(DATA, key=key),
        option("--weights FILE", weights, reads=True),
        blocks(),
    )


def _how() -> list[Option]:
    return [
        seed("the model, where no weights are given"),
        precision(None),
        *run_platform(),
        option("--run NAME", "name of the run (default: a random one)", to="name"),
        *fault_options(),
        *group(
            "limits",
            limits(),
            option("--yes", "start though a limit is expected to be reached before the last sample"),
        ),
    ]


@verb(
    "funcpipe evaluate funcpipe.examples.spirals:model --plan plan.json \\\n"
    "    --data funcpipe.examples.spirals:train_data --weights spirals.pt",
    MODEL,
    _plan_and_data("data.validation"),
    group("evaluation", loss(), metrics()),
    _how(),
)
def evaluate(options: Options) -> None:
    """Measure a model in eval mode."""
    pipe, settings = _pipe(options)
    found = pipe.evaluate(load_data(options.data), metrics=metrics_of(options), **settings)
    values = {"loss": found.loss, **found.metrics}
    summary = {"run": found.run, "samples": found.samples, **values, "cost_usd": found.bill.cost_usd}
    render.show(options.json, render.as_json(summary), partial(render.evaluation, found))


@verb(
    "funcpipe predict funcpipe.examples.spirals:model --plan plan.json \\\n"
    "    --data funcpipe.examples.spirals:train_data --weights spirals.pt -o outputs.safetensors",
    MODEL,
    _plan_and_data(""),
    group(
        "evaluation",
        option("-o --output FILE", "write the outputs by name, as a safetensors file", needed=True, writes=""),
    ),
    _how(),
)
def predict(options: Options) -> None:
    """Write the outputs of a model in eval mode."""
    from safetensors.torch import save_file

    pipe, settings = _pipe(options)
    outputs = pipe.predict(load_data(options.data), **settings)
    write_file(partial(save_file, {name: tensor.contiguous() for name, tensor in outputs.items()}), options.output)
    shapes = {name: list(tensor.shape) for name, tensor in outputs.items()}
    summary = {"output": options.output, "shapes": shapes}
    render.show(options.json, render.as_json(summary), partial(render.predictions, shapes, options.output))


def _pipe(options: Options) -> "tuple[FuncPipe, dict[str, Any]]":
    """The model, and the common arguments of `evaluate` and `predict`."""
    plan = read(Plan, options.plan)
    check_code(options)
    load_torch(options.platform)
    settings = {**run_of(options), "plan": plan}
    return pipe_of(options, precision=options.precision or plan.precision), settings
