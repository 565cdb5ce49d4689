"""The loss of the first micro-batch: checks that the loss takes the output, and returns what training needs."""

import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.texts import error_line
from funcpipe.errors import DataError, FuncPipeError, ModelError
from funcpipe.model.graph.user_code import users_frame
from funcpipe.training.losses import LossFunction, WeightedLoss, seed_loss

OFF = "rehearse=False (--no-rehearsal) starts without this check"

MEAN = "it must return the mean over the samples that it is given, as torch's losses do with reduction='mean'"


def loss_of(loss: LossFunction, output: Any, target: Any, *, seed: int) -> Tensor:
    """The loss, one number with a gradient. Raises DataError or ModelError for anything else."""
    seed_loss(seed, 0, 0)
    try:
        with torch.enable_grad(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found: Any = loss(output, target)
    except FuncPipeError:
        raise
    except Exception as error:
        raise DataError(
            f"the loss function fails on the first micro-batch{_line(error)}: {error_line(error).rstrip('.')}. The "
            f"model's output is {described(output)}, the target is {described(target)}{_hint(output, target)}"
        ) from error
    _check_shapes(warned, output, target)
    if isinstance(found, tuple) and isinstance(loss, WeightedLoss):
        found = found[0] / found[1] if found[1] else found[0]
    if isinstance(found, tuple) and len(found) == 2:
        raise DataError(
            "the loss function returns a tuple, not a tensor; for a sum and its weight give reduction='weighted' "
            f"(--reduction weighted), or else {MEAN}"
        )
    if not isinstance(found, Tensor):
        raise DataError(f"the loss function returns a {type(found).__name__}, not a tensor: {MEAN}")
    if found.numel() != 1:
        raise DataError(f"the loss function returns {described(found)}, not one number: {MEAN}")
    if not found.is_floating_point():
        raise DataError(f"the loss function returns {described(found)}, which has no gradient: {MEAN}")
    if not found.requires_grad:
        raise ModelError(
            "the loss has no gradient: nothing that requires one leads to it. Either no parameter of the model "
            "requires a gradient, or the way to the loss is cut off, as by detach(), argmax() or torch.no_grad()"
        )
    return found.reshape(())


def _check_shapes(warned: list[warnings.WarningMessage], output: Any, target: Any) -> None:
    """Raise DataError if torch has warned that output and target are broadcast; pass other warnings on."""
    for one in warned:
        if str(one.message).startswith("Using a target size"):
            raise DataError(
                f"the loss function compares every output with every target, as their shapes differ: the output is "
                f"{described(output)}, the target is {described(target)}; give both one shape, as with "
                f"target.unsqueeze(1) or output.squeeze(1). {OFF}"
            )
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)


def names_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and dictionaries, with their places."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from names_of(item, f"{name} {key}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from names_of(item, f"{name}[{i}]")


def described(value: Any) -> str:
    """A tensor's dtype and shape, and the range of whole numbers; of anything else, its type."""
    if not isinstance(value, Tensor):
        parts = ", ".join(described(tensor) for _, tensor in list(names_of(value, ""))[:3])
        return f"a {type(value).__name__}" + (f" of {parts}" if parts else "")
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) and value.numel():
        text += f" from {int(value.min())} to {int(value.max())}"
    return text


def _hint(output: Any, target: Any) -> str:
    """The most frequent cause for a target that the loss does not take."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.dim() < 1:
        return ""
    if target.dim() == output.dim() - 1:
        classes = output.size(1 if output.dim() > 1 else 0)
        if target.is_floating_point():
            return "; class indices must be whole numbers, of dtype torch.int64"
        if target.numel() and (int(target.max()) >= classes or int(target.min()) < 0):
            return f"; class indices must lie between 0 and {classes - 1}, for {classes} outputs"
    if target.is_floating_point() and output.dtype != target.dtype:
        return f"; the target should be {str(output.dtype).removeprefix('torch.')} as the output is"
    return "; their shapes and types must be those that the loss function takes" if output.shape != target.shape else ""


def _line(error: BaseException) -> str:
    """The last line of the user's own code that led to `error`, if there is one below the call of the loss."""
    found = users_frame(traceback.walk_tb(error.__traceback__))
    return "" if found is None else f", in {found[0].f_code.co_filename}:{found[1]}"
