"""The verbs evaluate and predict, and the validation of train."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show as render
from funcpipe.cli.factories import check_names, load_data, load_factory, make_model
from funcpipe.cli.files import write_file
from funcpipe.cli.model_files import SAFETENSORS
from funcpipe.cli.train_values import fault_tolerance, load_torch, run_limits
from funcpipe.core import Plan, RunSettings, Validation, read
from funcpipe.errors import InputError, InvalidValue
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from torch import nn

    from funcpipe.api import FuncPipe


def evaluate(options: argparse.Namespace) -> None:
    """Measure a model in eval mode."""
    pipe, settings = _model(options, options.loss)
    found = pipe.evaluate(load_data(options.data), metrics=metrics_of(options), **settings)
    values = {"loss": found.loss, **found.metrics}
    summary = {"run": found.run, "samples": found.samples, **values, "cost_usd": found.bill.cost_usd}
    render.show(options.json, render.as_json(summary), partial(render.evaluation, found))


def predict(options: argparse.Namespace) -> None:
    """Write the outputs of a model in eval mode."""
    from safetensors.torch import save_file

    pipe, settings = _model(options, "own")
    outputs = pipe.predict(load_data(options.data), **settings)
    write_file(partial(save_file, {name: tensor.contiguous() for name, tensor in outputs.items()}), options.output)
    shapes = {name: list(tensor.shape) for name, tensor in outputs.items()}
    summary = {"output": options.output, "shapes": shapes}
    render.show(options.json, render.as_json(summary), partial(render.predictions, shapes, options.output))


def check_validation(options: argparse.Namespace) -> None:
    """Raise InvalidValue for options of a validation without its data, InputError for data that is not there."""
    if options.validation_data is None:
        given = {"--metric": options.metrics, "--patience": options.patience, "--best": options.best}
        given |= {"--validate-steps": options.validate_steps, "--validate-epochs": options.validate_epochs}
        for option, value in given.items():
            if value:
                raise InvalidValue(option, value, "needs a dataset to validate on: --validation-data MODULE:FACTORY")
    else:
        check_names({"--validation-data": options.validation_data})


def validation_of(options: argparse.Namespace) -> Validation | None:
    """The validation of `train`, if there is one."""
    if options.validation_data is None:
        return None
    return Validation(
        data=load_data(options.validation_data),
        every_steps=options.validate_steps,
        every_epochs=options.validate_epochs,
        metrics=metrics_of(options),
        monitor=options.monitor,
        mode=options.monitor_mode,
        patience=options.patience,
        min_delta=options.min_delta,
    )


def metrics_of(options: argparse.Namespace) -> dict[str, Any]:
    """The metrics that were named, as NAME=MODULE:FACTORY."""
    found = {}
    for text in options.metrics:
        name, equals, factory = text.partition("=")
        if not equals:
            raise InvalidValue("--metric", text, "must read NAME=MODULE:FACTORY")
        found[name] = load_factory(factory)
    return found


def _model(options: argparse.Namespace, loss: str) -> "tuple[FuncPipe, dict[str, Any]]":
    """The model, and the common arguments of `evaluate` and `predict`."""
    plan = read(Plan, options.plan)
    check_names({"the model": options.model, "--data": options.data})
    check_names({} if loss == "own" else {"--loss": loss})
    load_torch(options.platform)
    import torch

    from funcpipe.api import FuncPipe

    torch.manual_seed(options.seed)
    model = make_model(options.model)
    if options.weights:
        _load_weights(model, options.weights)
    settings = {
        "platform": options.platform,
        "like": options.like,
        "plan": plan,
        "seed": options.seed,
        "faults": fault_tolerance(options),
        "limits": run_limits(options),
        "settings": RunSettings(
            name=options.run_name,
            storage=options.storage,
            message_deadline_s=options.message_deadline,
            prices=load_spec(options.spec) if options.spec else None,
        ),
    }
    pipe = FuncPipe(
        model,
        loss_fn=None if loss == "own" else load_factory(loss),
        precision=options.precision or plan.precision,
        name=options.model,
        blocks=options.blocks,
    )
    return pipe, settings


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
