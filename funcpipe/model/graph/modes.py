"""Training and eval mode of a user's model, as its own `train()` and `eval()` set them.

These may keep parts in eval mode, freeze parameters or set attributes. Functions call them too, of the modules that run
there as they are. So they must do the same each time, and leave the values of parameters and buffers alone.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from funcpipe.errors import ModelError
from funcpipe.model.graph.isolation import Snapshot
from funcpipe.model.graph.patches import as_if_exporting
from funcpipe.model.graph.python_state import read_state
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.tensors import digest, is_weightless

WAS_IN_EVAL_MODE = (
    "the model is in eval mode; it is trained in training mode, as after model.train(). What is to stay in eval mode "
    "must be put there after model.train()"
)


@contextlib.contextmanager
def training_mode(model: nn.Module, *, caches: bool = False, shortcuts: bool = False) -> Iterator[None]:
    """Have the model's own `train()` put it in training mode, without caches unless these are to stay as they are.

    If the model is in training mode already, modules that the user has put in eval mode stay in it. A model without
    weights takes shortcuts that depend on data only with `shortcuts`.
    """
    by_hand = [module for module in model.modules() if not module.training] if model.training else []
    with (
        _modes_restored(model),
        contextlib.nullcontext() if caches else without_caches(model),
        _no_shortcuts(model, unless=shortcuts),
    ):
        _switch(model, training=True)
        for module in by_hand:
            module.training = False
        yield


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, *, shortcuts: bool = False) -> Iterator[None]:
    """Have the model's own `eval()` put it in eval mode, without caches; what else that sets is undone at the end.

    As for `shortcuts`, see `training_mode`.
    """
    with _modes_restored(model), _undone(model), without_caches(model), _no_shortcuts(model, unless=shortcuts):
        _switch(model, training=False)
        yield


def _no_shortcuts(model: nn.Module, *, unless: bool) -> contextlib.AbstractContextManager[None]:
    """Have a model without weights take no shortcuts that depend on data, `unless` it may."""
    return as_if_exporting() if is_weightless(model) and not unless else contextlib.nullcontext()


def set_mode(module: nn.Module, *, training: bool) -> None:
    """Call the own `train()` or `eval()` of `module`, which may take no argument."""
    if training:
        module.train()
    else:
        module.eval()


def check_modes(model: nn.Module, *, training: bool) -> None:
    """Raise ModelError if the own `train()` or `eval()` of `model` cannot do in functions what it does in a script."""
    if not any(map(_has_own_modes, model.modules())):
        return
    title = f"{'train' if training else 'eval'}() of {type(model).__name__}"
    snapshot, values, start = Snapshot(model), _values(model), read_state(model)
    with _modes_restored(model):
        _switch(model, training=training)
        changed = [name for name, value in _values(model).items() if value != values.get(name)]
        if changed:
            if not training:
                _switch(model, training=True)
            raise ModelError(
                f"{title} changes the values of {', '.join(changed[:3])}, which functions of other stages would not "
                "see; call it before the model is given to FuncPipe, or let it set modes alone (in loralib, with "
                "merge_weights=False)"
            )
        once = _settings(model)
        _switch(model, training=training)
        repeated = [name for name, value in _settings(model).items() if value != once.get(name)]
        elsewhere = _set_elsewhere(model, start) if not training else []
    if repeated:
        snapshot.restore()
        raise ModelError(
            f"{title} changes {', '.join(repeated[:3])} each time that it is called, but functions call it whenever "
            "they start: let it do the same each time, and count steps or epochs in a scheduler"
        )
    if elsewhere:
        snapshot.restore()
        raise ModelError(
            f"{title} sets {', '.join(elsewhere[:3])}, an attribute of a module without an eval() of its own, which "
            "the function that holds that module does not call; set it in a train() of the class of that module"
        )
    if not training:
        snapshot.restore()


def _switch(model: nn.Module, *, training: bool) -> None:
    try:
        set_mode(model, training=training)
    except Exception as error:
        name = "train" if training else "eval"
        raise ModelError(
            f"{name}() of the model fails: {source_location(model, error)[1]}; it must work as model.{name}()"
        ) from error


def _has_own_modes(module: nn.Module) -> bool:
    methods = ((name, getattr(nn.Module, name)) for name in ("train", "eval"))
    return any(getattr(type(module), name) is not method or name in vars(module) for name, method in methods)


def _values(model: nn.Module) -> dict[str, Any]:
    """The contents of all parameters and buffers, in short."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: digest(tensor) for name, tensor in tensors if not is_lazy(tensor)}


def _settings(model: nn.Module) -> Mapping[str, Any]:
    """All else that `train()` may change, and the values of parameters and buffers, by name."""
    flags = {f"{name}.requires_grad": parameter.requires_grad for name, parameter in model.named_parameters()}
    return {**_values(model), **flags, **{str(slot): value for slot, value in read_state(model).items()}}


def _set_elsewhere(model: nn.Module, start: Mapping[Any, Any]) -> list[str]:
    """The attributes that differ from those at the `start`, of modules without a `train()` or `eval()` of their own."""
    modules = dict(model.named_modules())
    return [
        str(slot)
        for slot, value in read_state(model).items()
        if slot.attribute != "training" and value != start.get(slot) and not _has_own_modes(modules[slot.path])
    ]


@contextlib.contextmanager
def _modes_restored(model: nn.Module) -> Iterator[None]:
    """Put every module of the model back into training or eval mode, as it was, at the end."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Restore attributes, and what is frozen, at the end, if the model has an `eval()` that may set them."""
    if not any(map(_has_own_modes, model.modules())):
        yield
        return
    snapshot, flags = Snapshot(model), [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        snapshot.restore()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in the configurations of the model's modules: caches serve generation only."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    with_cache = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in with_cache:
        config.use_cache = False
    try:
        yield
    finally:
        for config in with_cache:
            config.use_cache = True
