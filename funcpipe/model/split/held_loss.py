"""What a loss holds that is trained with the last stage, or that its calls change: as a module beside the stage's own.

Its names are those of the loss below "<loss>", which no module of a user's has:

    loss.head.weight    ->    <loss>.head.weight
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from funcpipe.model.graph.program import is_inside
from funcpipe.model.graph.reachable import reaches
from funcpipe.model.graph.values import Carried
from funcpipe.model.split.stage import LOSS, StageModule

T = TypeVar("T")

_BELOW = f"{LOSS}."

_SHOWN = 4


def trained_by(loss: Callable[..., Any]) -> dict[str, nn.Parameter]:
    """The trainable parameters that `loss` reaches, by name: those of a module in its order, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, value in reaches(loss):
        if isinstance(value, nn.Module):
            for name, parameter in value.named_parameters(prefix=path):
                found.setdefault(id(parameter), (name, parameter))
        elif isinstance(value, nn.Parameter):
            found.setdefault(id(value), (path, value))
    return {_BELOW + name: parameter for name, parameter in found.values() if parameter.requires_grad}


def hold(loss: Callable[..., Any], blocks: Collection[str] = ()) -> nn.Module:
    """A module with the very parameters that `loss` trains, and its modules at the paths `blocks` as they are."""
    if LOSS in blocks:
        assert isinstance(loss, nn.Module), "only modules are blocks"
        return loss
    holder, values = nn.Module(), dict(reaches(loss)) if blocks else {}
    for block in blocks:
        _owner(holder, block)._modules[block.rpartition(".")[2]] = values[block.removeprefix(_BELOW)]
    for name, parameter in trained_by(loss).items():
        if not any(is_inside(name, block) for block in blocks):
            _owner(holder, name)._parameters[name.rpartition(".")[2]] = parameter
    return holder


def attach_loss(stage: StageModule, loss: Callable[..., Any], carried: Carried) -> None:
    """Let the last `stage` have what `loss` trains, and what its calls leave for the next ones as `carried` says."""
    if not carried.names and not trained_by(loss):
        return
    holder, own = hold(loss, carried.blocks), stage.carried
    vars(stage)[LOSS] = holder
    stage.training_modes |= {name: module.training for name, module in holder.named_modules(prefix=LOSS)}
    stage.carried = Carried(
        blocks=(*own.blocks, *carried.blocks),
        attributes=(*own.attributes, *carried.attributes),
        buffers=(*own.buffers, *carried.buffers),
    )


def modules_of(loss: Callable[..., Any] | None) -> list[nn.Module]:
    """The modules that `loss` reaches, those inside others too."""
    return [value for _, value in reaches(loss) if isinstance(value, nn.Module)]


@contextlib.contextmanager
def in_eval_mode(loss: Callable[..., Any] | None) -> Iterator[None]:
    """Within this context, the modules that `loss` reaches are in eval mode."""
    modules = modules_of(loss)
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def kept_names(carried: Carried) -> str:
    """What calls of a loss leave for the next ones, for a message."""
    names = list(of_loss(dict.fromkeys(carried.names)))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def block_names(names: Iterable[str]) -> tuple[str, ...]:
    """Which of `names`, those of blocks of the last stage, are the loss's."""
    return tuple(name for name in names if is_inside(name, LOSS))


def of_model(named: Mapping[str, T]) -> dict[str, T]:
    """What of `named` is the model's own."""
    return {name: value for name, value in named.items() if not is_inside(name, LOSS)}


def of_loss(named: Mapping[str, T]) -> dict[str, T]:
    """What of `named` is the loss's, under the names that the loss has for it."""
    return {name.removeprefix(LOSS).removeprefix("."): v for name, v in named.items() if is_inside(name, LOSS)}


def below_loss(named: Mapping[str, T]) -> dict[str, T]:
    """What is `named` as the loss has it, under the names that a stage has for it."""
    return {f"{_BELOW}{name}".rstrip("."): value for name, value in named.items()}


def _owner(holder: nn.Module, name: str) -> nn.Module:
    """The module in `holder` that is to have the entry `name`; those on the way are made."""
    for part in name.removeprefix(_BELOW).split(".")[:-1]:
        holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    return holder
