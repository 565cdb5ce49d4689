"""The first step at home: one micro-batch through model, loss, backward and optimiser, before any function starts.

Their errors are found here, for nothing. The model, its gradients and the random number generators are
afterwards what they were. No more than the gradients and a few of the parameters are held besides the model.
"""

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.prepare.data import SpreadSamples
from funcpipe.client.prepare.joint_trial import JointTrial
from funcpipe.client.prepare.loss_calls import trying
from funcpipe.client.prepare.loss_trial import check_ignored, check_is_mean
from funcpipe.client.prepare.loss_value import OFF, described, loss_of, names_of
from funcpipe.core import OnNan
from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, FuncPipeError, ModelError
from funcpipe.model.draws import GENERATORS, is_from_torch, layer_seed, reseed
from funcpipe.model.graph.isolation import preserve_gradients, preserve_state
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.graph.values import NOTHING_CARRIED, Carried
from funcpipe.model.split.stage import hold, modules_of, of_model, trained_by
from funcpipe.model.tensors import copied, stand_in, tensors_in, tree_map
from funcpipe.training.data import LoadedBatch
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.optimizers import ParameterShape, stage_optimizer, trainable_shapes
from funcpipe.training.parameter_hooks import hooks_of, try_hooks
from funcpipe.training.recipe import Recipe

_log = logging.getLogger(__name__)

_AT_A_TIME_BYTES = 64 << 20
"""About the bytes of parameters that are copied at a time, to be updated."""


def rehearse(
    model: nn.Module,
    recipe: Recipe,
    batch: LoadedBatch,
    *,
    seed: int,
    spread: SpreadSamples | None = None,
    joint: JointTrial | None = None,
) -> Carried:
    """Train `model` on `batch`, the first samples of the dataset in its own order, and forget it.

    With `spread` samples, the loss of a batch must be the mean of its micro-batches' losses, as far as they show. With
    a `joint` trial, the loss is that of `batch` and other samples together. Returns what calls of the loss leave for
    the next ones.

    Raises DataError for samples or a loss that cannot be trained with, ModelError for the model or its optimiser. Where
    a run goes on with numbers that are not finite, a loss that is not is only a warning.
    """
    began_s = time.monotonic()
    stops, hooks = recipe.on_nan is OnNan.STOP, hooks_of(model.named_parameters())
    trained = _trained(model, recipe.loss)
    with (
        training_mode(model),
        preserve_state(model),
        trying(recipe.loss, recipe.cast_loss, seed=seed) as calls,
        preserve_gradients(model),
        preserve_gradients(hold(recipe.loss)),
    ):
        reseed(layer_seed(seed, 0, 0, "rehearsal"), GENERATORS)
        with autocast_to(recipe.precision):
            output = _forward(model, batch)
            given = (output, batch.target) if joint is None else joint.whole(model, recipe, batch, output)
            calls.check_untouched("the forward of the model")
            outputs, target = tree_map(given, _detached_copy)  # the loss may write into them
            loss = loss_of(recipe.cast_loss, *given, seed=seed)
        if not math.isfinite(loss.item()):
            kind, said = _not_finite(model, batch, output, loss.item())
            if stops:
                raise kind(f"{said}. {OFF}")
            _log.warning("%s. The run goes on in spite of it: on_nan is %r", said, recipe.on_nan.value)
        number, finite = loss.item(), math.isfinite(loss.item())
        _backward(model, [loss], trained)
        carried = calls.carried(outputs, target, None if recipe.is_weighted else loss)
        del output, loss, given
        try_hooks(model, hooks, seed=seed, scales_loss=recipe.precision.scales_loss or recipe.is_weighted)
        if stops:
            _check_gradients(trained, number)
        _update(trained, trainable_shapes(model, recipe.loss), recipe, seed=seed)
        if spread is not None and finite:
            check_is_mean(model, recipe, replace(batch, target=target), outputs, spread, seed=seed)
    _log.info("one micro-batch was trained on here in %.2f s, and nothing is wrong with it", time.monotonic() - began_s)
    return carried


def rehearse_shapes(
    model: nn.Module, recipe: Recipe, batch: LoadedBatch, *, seed: int, spread: SpreadSamples | None = None
) -> Carried:
    """Run `model`, whose weights are not here, forward and backward on `batch`: what depends on shapes fails here.

    The loss is tried on outputs of random numbers, with samples of `spread` as in `rehearse`. Returns what calls of it
    leave for the next ones. Raises ModelError, or DataError for a loss that cannot be trained with.
    """
    trained = _trained(model, recipe.loss)
    with training_mode(model), preserve_state(model), preserve_gradients(model), autocast_to(recipe.precision):
        output = _forward(model, batch)
        end = recipe.loss(output, batch.target) if recipe.loss is loss_of_output else output
        roots = [tensor for tensor in tensors_in(end) if tensor.requires_grad]
        _backward(model, roots, trained)
        if spread is not None and recipe.loss is loss_of_output:
            check_ignored(spread)
        elif spread is not None:
            check_is_mean(model, recipe, batch, stand_in(tree_map(output, _detached_copy)), spread, seed=seed)
    _log.info("the first micro-batch fits the model, whose weights are not here: the loss was tried on random numbers")
    return carried_by_loss(model, recipe, batch, seed=seed)


def carried_by_loss(model: nn.Module, recipe: Recipe, batch: LoadedBatch, *, seed: int) -> Carried:
    """The state that calls of the loss leave for the next ones, where nothing else is tried: it is called if it holds
    modules of the user's, which alone may keep something.
    """
    if all(is_from_torch(module) for module in modules_of(recipe.loss)):
        return NOTHING_CARRIED
    with (
        training_mode(model),
        preserve_state(model),
        trying(recipe.loss, recipe.cast_loss, seed=seed) as calls,
        torch.no_grad(),
    ):
        try:
            reseed(layer_seed(seed, 0, 0, "rehearsal"), GENERATORS)
            with autocast_to(recipe.precision):
                output = stand_in(_forward(model, batch))
            calls.check_untouched("the forward of the model")
            return calls.carried(output, batch.target)
        except FuncPipeError:
            raise
        except Exception:  # noqa: BLE001 - a failing loss is reported where it is computed
            return NOTHING_CARRIED


def check_is_finite(model: nn.Module, recipe: Recipe, batch: LoadedBatch, *, index: int, seed: int) -> None:
    """Raise DataError if the sample at `index`, of which `batch` is made, holds NaN and so makes its loss NaN."""
    named = (*names_of({**dict(enumerate(batch.args)), **batch.kwargs}, "input"), *names_of(batch.target, "target"))
    bad = [name for name, tensor in named if tensor.is_floating_point() and not is_finite(tensor)]
    if not bad or recipe.on_nan is not OnNan.STOP:
        return
    with training_mode(model), preserve_state(model), trying(recipe.loss, recipe.cast_loss, seed=seed):
        reseed(layer_seed(seed, 0, 0, "rehearsal"), GENERATORS)
        with autocast_to(recipe.precision):
            number = loss_of(recipe.cast_loss, _forward(model, batch), batch.target, seed=seed).item()
    if not math.isfinite(number):
        raise DataError(
            f"sample {index} of the dataset makes the loss {number}: its {bad[0].strip()} holds NaN or infinity; mend "
            f"or leave out such samples. {OFF}"
        )


def _trained(model: nn.Module, loss: LossFunction) -> dict[str, nn.Parameter]:
    """The trainable parameters of model and loss by name."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**own, **trained_by(loss)}


def _forward(model: nn.Module, batch: LoadedBatch) -> Any:
    args, kwargs = copied(batch.args), copied(dict(batch.kwargs))
    try:
        with torch.enable_grad():
            return model(*args, **kwargs)
    except Exception as error:
        raise ModelError(f"the model fails on the first micro-batch: {source_location(model, error)[1]}") from error


def _detached_copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _backward(model: nn.Module, ends: Sequence[Tensor], trained: Mapping[str, nn.Parameter]) -> None:
    """Leave the gradients of `ends`, by default the loss, in the `trained` parameters."""
    try:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    except Exception as error:
        raise ModelError(
            f"the backward pass of the first micro-batch fails: {source_location(model, error)[1]}"
        ) from error
    if all(parameter.grad is None for parameter in of_model(trained).values()):
        raise ModelError(
            "no parameter of the model gets a gradient from the loss: what leads from them to the loss is cut off, as "
            "by detach(), item() or torch.no_grad(), or it does not use them"
        )


def _check_gradients(trained: Mapping[str, nn.Parameter], loss: float) -> None:
    for name, parameter in trained.items():
        gradient = parameter.grad
        if gradient is not None and gradient.dtype is not torch.float16 and not is_finite(gradient):
            raise ModelError(
                f"the gradient of {name} on the first micro-batch is not finite, although the loss is {loss:.6g}: "
                f"look for the square root of 0, a norm of 0 or 0/0 behind torch.where in what uses it; {OFF}"
            )


def _update(
    trained: Mapping[str, nn.Parameter], shapes: Sequence[ParameterShape], recipe: Recipe, *, seed: int
) -> None:
    """Have the optimiser update copies of the `trained` parameters, some at a time."""
    chunk: dict[str, nn.Parameter] = {}
    for name, parameter in trained.items():
        if recipe.clip_grad_value is not None and parameter.grad is not None and parameter.grad.is_sparse:
            raise ModelError(
                f"clip_grad_value cannot clip the gradient of {name}, which is sparse; make the layer with "
                "sparse=False, or train without clip_grad_value"
            )
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad, parameter.grad = parameter.grad, None
        chunk[name] = copy
        if sum(other.nbytes for other in chunk.values()) >= _AT_A_TIME_BYTES:
            _step(chunk, recipe, shapes, seed=seed)
            chunk = {}
    if chunk:
        _step(chunk, recipe, shapes, seed=seed)


def _step(parameters: dict[str, nn.Parameter], recipe: Recipe, shapes: Sequence[ParameterShape], *, seed: int) -> None:
    try:
        optimizer = stage_optimizer(recipe.optimizer, parameters, shapes)
    except Exception as error:
        raise ModelError(
            f"the optimiser cannot be made: {error_text(error)}. It must be a factory that takes "
            "parameters, those of one stage at a time, such as functools.partial(torch.optim.Adam, lr=0.001)"
        ) from error
    reseed(layer_seed(seed, 0, 0, "optimizer"))
    try:
        optimizer.step()
    except Exception as error:
        raise ModelError(
            f"the optimiser {type(optimizer).__name__} fails in its first step: {error_text(error)}; "
            "choose one whose step() needs nothing but the gradients"
        ) from error
    for name, parameter in parameters.items():
        if recipe.on_nan is OnNan.STOP and not is_finite(parameter):
            raise ModelError(
                f"the first step of the optimiser {type(optimizer).__name__} makes {name} NaN or infinite: "
                f"its settings are {_settings(optimizer)}; choose a smaller learning rate. {OFF}"
            )


def _settings(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    return ", ".join(f"{name}={value}" for name, value in group.items() if name != "params" and value is not None)


def is_finite(tensor: Tensor) -> bool:
    """Return True if all elements are finite; most often one sum decides."""
    values = tensor.detach()
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _not_finite(
    model: nn.Module, batch: LoadedBatch, output: Any, number: float
) -> tuple[type[DataError | ModelError], str]:
    """The cause of a first loss that is not finite, the data, the model or the loss itself, and its error."""
    said = f"the loss of the first micro-batch is {number}"
    inputs = names_of({**dict(enumerate(batch.args)), **batch.kwargs}, "input")
    for name, tensor in itertools.chain(inputs, names_of(batch.target, "target")):
        if tensor.is_floating_point() and not is_finite(tensor):
            return DataError, f"{said}: {_bad_samples(name, tensor)}; mend or leave out such samples"
    first = _first_not_finite(model, batch)
    if first is not None:
        return ModelError, f"{said}: the first module whose output is not finite is {first}"
    return ModelError, (
        f"{said}, although the model's output is finite ({described(output)}): the loss function makes it so, as "
        "log(0), a division by 0 or a mean over nothing would"
    )


def _bad_samples(name: str, tensor: Tensor) -> str:
    """The samples of the first micro-batch that are not finite in one tensor, by their number in the dataset."""
    bad = ~torch.isfinite(tensor)
    rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if tensor.dim() else [0]
    what = "NaN" if torch.isnan(tensor).any() else "an infinity"
    return f"{name} holds {what} in {int(bad.sum())} of {bad.numel()} values, first in sample {rows[0]} of the dataset"


def _first_not_finite(model: nn.Module, batch: LoadedBatch) -> str | None:
    """The first module whose output is not finite, if there is one; the model runs once more to find it."""
    found: list[str] = []
    handles = []

    def hook_of(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [tensor for _, tensor in names_of(output, "")]
            if not found and not all(is_finite(t) for t in tensors if t.is_floating_point()):
                found.append(f"{path} ({type(module).__name__})" if path else type(module).__name__)

        return hook

    for path, module in model.named_modules():
        handles.append(module.register_forward_hook(hook_of(path)))
    try:
        _forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
