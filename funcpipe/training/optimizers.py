"""Makes a stage's optimiser as plain PyTorch makes that of the whole model.

In every stage the factory is given all trainable parameters of the model, in the model's order, under their full names.
Those of other stages are stand-ins without memory, which leave the optimiser once it is made. So a factory may group
parameters by name, by shape or by position, and may leave some out: every stage has the same groups with the same
settings, some of them empty, and a scheduler with a value for each group fits in every stage.

    whole model      group 0: a.weight b.weight     group 1: a.bias b.bias
    stage of `b`     group 0: b.weight              group 1: b.bias
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from funcpipe.errors import ModelError
from funcpipe.model.split.stage import trained_by
from funcpipe.training.recipe import LossFunction, OptimizerFactory

NAMED = "named_parameters"
"""A factory whose argument has this name is given pairs of name and parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """A trainable parameter of the model, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self) -> nn.Parameter:
        """Return a parameter of this shape that takes the memory of one element."""
        return nn.Parameter(torch.zeros((), dtype=self.dtype).expand(self.shape))


def trainable_shapes(model: nn.Module, loss: LossFunction | None = None) -> tuple[ParameterShape, ...]:
    """Return the trainable parameters of `model`, in its order, and then those of `loss`; tied ones once, under their
    first name.

    Lazy ones, which have no shape yet, are left out. Raises ModelError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model must be an nn.Module that is made already, got {model!r}")
    named = [*model.named_parameters(), *({} if loss is None else trained_by(loss)).items()]
    return tuple(
        ParameterShape(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype)
        for name, parameter in named
        if parameter.requires_grad and not is_lazy(parameter)
    )


def takes_names(factory: Callable[..., Any]) -> bool:
    """Return True if an optimiser factory asks for the parameters' names."""
    try:
        return NAMED in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        return False


def call_factory(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimiser that `factory` makes of parameters, of which it gets the names if it asks for them."""
    if takes_names(factory):
        return factory(**{NAMED: list(named)})
    return factory([parameter for _, parameter in named])


def stage_optimizer(
    factory: OptimizerFactory, own: Mapping[str, nn.Parameter], whole: Sequence[ParameterShape]
) -> Optimizer:
    """Return the optimiser of a stage's `own` parameters, which is made as that of the `whole` model.

    `own` has each parameter under its name in `whole`, or under a name of its own if that does not hold it.
    """
    named = [(shape.name, own[shape.name] if shape.name in own else shape.stand_in()) for shape in whole]
    known = {shape.name for shape in whole}
    named += [(name, parameter) for name, parameter in own.items() if name not in known]
    optimizer = call_factory(factory, named)
    _leave_only(optimizer, {id(parameter) for parameter in own.values()})
    return optimizer


def _leave_only(optimizer: Optimizer, kept: set[int]) -> None:
    """Remove the stand-ins from `optimizer`: parameters whose ids are not `kept`."""
    for group in optimizer.param_groups:
        mine = [id(parameter) in kept for parameter in group["params"]]
        for field in ("params", "param_names"):
            if field in group:
                group[field] = list(compress(group[field], mine))
    for parameter in [key for key in optimizer.state if isinstance(key, nn.Parameter) and id(key) not in kept]:
        del optimizer.state[parameter]
