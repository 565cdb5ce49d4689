"""What a stage has learned, as tensors and a text: its parameters, buffers, optimiser and loss scale.

It can be taken from a stage and put back, merged over stages, and selected from for a stage cut otherwise.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import CorruptMessage, ModelError, PlanError
from funcpipe.training.norms import GradientNorm, LossScale

MODEL, OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """`tensors` holds the model's under "model/NAME", the optimiser's under "optimizer/PARAMETER/…".

    `aliases` maps further names of model tensors to those; `transient` are buffers that no `state_dict` has.
    `settings` is plain JSON.
    """

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    transient: frozenset[str]
    settings: Mapping[str, Any]

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, as far as the stage holds it, under all names."""
        names = [name.removeprefix(MODEL) for name in self.tensors if name.startswith(MODEL)]
        held = {name: self.tensors[MODEL + name] for name in names}
        held |= {alias: held[name] for alias, name in self.aliases.items()}
        return {name: tensor for name, tensor in held.items() if name not in self.transient}


def take(stage: nn.Module, optimizer: torch.optim.Optimizer | None, norm: GradientNorm) -> StageState:
    """What `stage` has learned, without copying it. Raises ModelError if the optimiser keeps what is not data."""
    names, aliases = names_of(stage)
    tensors = {MODEL + name: tensor.detach() for name, tensor in names.items()}
    name_of = {id(tensor): name for name, tensor in names.items()}
    settings: dict[str, Any] = {"optimizer": None, "loss_scale": None}
    if optimizer is not None:
        settings["optimizer"] = {
            "state": {
                name_of[id(p)]: flatten(state, f"{OPTIMIZER}{name_of[id(p)]}", tensors)
                for p, state in optimizer.state.items()
            },
            "groups": [
                {
                    "parameters": [name_of[id(p)] for p in group["params"]],
                    "settings": flatten(without_params(group), f"{OPTIMIZER}group/{i}", tensors),
                }
                for i, group in enumerate(optimizer.param_groups)
            ],
        }
    if norm.loss_scale is not None:
        settings["loss_scale"] = [norm.loss_scale.factor, norm.loss_scale.good_steps]
    return StageState(tensors=tensors, aliases=aliases, transient=_transient(stage), settings=settings)


def put_back(state: StageState, stage: nn.Module, optimizer: torch.optim.Optimizer | None, norm: GradientNorm) -> None:
    """Make `stage`, its optimiser and its loss scale what they were. Raises CorruptMessage if they do not match."""
    names, _ = names_of(stage)
    with matching():
        with torch.no_grad():
            for name, tensor in names.items():
                tensor.copy_(state.tensors[MODEL + name])
        if optimizer is not None:
            _put_back_optimizer(state, optimizer, {id(tensor): name for name, tensor in names.items()})
        if norm.loss_scale is not None and state.settings["loss_scale"] is not None:
            norm.loss_scale = LossScale(*state.settings["loss_scale"])


@contextlib.contextmanager
def matching() -> Iterator[None]:
    """Raise CorruptMessage for what goes wrong when a state that is not a stage's is put into it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptMessage(f"a checkpoint does not match its stage: {type(error).__name__}: {error}") from error


def merge(states: Sequence[StageState]) -> StageState:
    """The state of the whole model, from those of all stages."""
    kept = [state.settings["optimizer"] for state in states if state.settings["optimizer"] is not None]
    tensors: dict[str, Tensor] = {}
    groups: list[Any] = []
    for number, state in enumerate(states):
        moved = _moved_groups(state, number)
        tensors |= moved.tensors
        groups += moved.settings["optimizer"]["groups"] if moved.settings["optimizer"] is not None else []
    optimizer = {"state": {n: s for part in kept for n, s in part["state"].items()}, "groups": groups}
    return StageState(
        tensors=tensors,
        aliases={alias: name for state in states for alias, name in state.aliases.items()},
        transient=frozenset[str]().union(*(state.transient for state in states)),
        settings={"optimizer": optimizer if kept else None, "loss_scale": states[0].settings["loss_scale"]},
    )


def select(whole: StageState, stage: nn.Module) -> StageState:
    """The part of `whole` that `stage` needs, under its names. Raises PlanError if something is not there."""
    names, aliases = names_of(stage)
    source = {name: whole.aliases.get(name, name) for name in names}
    missing = [name for name, stored in source.items() if MODEL + stored not in whole.tensors]
    if missing:
        raise PlanError(f"the checkpoints are of another model: they do not hold {missing[0]!r}")
    for name, tensor in names.items():
        stored = whole.tensors[MODEL + source[name]]
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise PlanError(
                f"the checkpoints are of another model: {name!r} has shape {list(stored.shape)} of {stored.dtype} "
                f"there, {list(tensor.shape)} of {tensor.dtype} here"
            )
    tensors = {MODEL + name: whole.tensors[MODEL + stored] for name, stored in source.items()}
    optimizer = whole.settings["optimizer"]
    if optimizer is not None:
        optimizer = _select_optimizer(optimizer, source)
        tensors |= {name: whole.tensors[name] for name in _references(optimizer)}
    settings = {**whole.settings, "optimizer": optimizer}
    return StageState(tensors=tensors, aliases=aliases, transient=_transient(stage), settings=settings)


def to_text(settings: Mapping[str, Any]) -> str:
    """`settings` as JSON."""
    return json.dumps(settings, separators=(",", ":"))


def from_text(text: str) -> Mapping[str, Any]:
    """The inverse; raises CorruptMessage."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptMessage(f"the settings of a checkpoint are not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.keys() != {"optimizer", "loss_scale"}:
        raise CorruptMessage("the settings of a checkpoint must hold an optimizer and a loss_scale")
    return settings


def names_of(stage: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters and buffers of `stage` by their first name; their further names."""
    names: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in (
        *stage.named_parameters(remove_duplicate=False),
        *stage.named_buffers(remove_duplicate=False),
    ):
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            names[name] = tensor
    return names, aliases


def _transient(stage: nn.Module) -> frozenset[str]:
    buffers = {name for name, _ in stage.named_buffers(remove_duplicate=False)}
    return frozenset(buffers - stage.state_dict().keys())


def _put_back_optimizer(state: StageState, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    saved = state.settings["optimizer"]
    if saved is None:
        return
    put_back_groups(state, optimizer, [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups])
    for group in optimizer.param_groups:
        for p in group["params"]:
            if name_of[id(p)] in saved["state"]:
                optimizer.state[p] = build(saved["state"][name_of[id(p)]], state.tensors)


def put_back_groups(state: StageState, optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> None:
    """Give the groups of `optimizer`, of which `names` names the parameters, the settings that they had."""
    groups = state.settings["optimizer"]["groups"]
    settings_of = {name: group["settings"] for group in groups for name in group["parameters"]}
    for group, own in zip(optimizer.param_groups, names, strict=True):
        found = [build(settings_of[name], state.tensors) for name in own]
        if any(other != found[0] for other in found):
            raise PlanError(
                "parameters that had different settings of the optimiser are in one group now; "
                "keep the optimiser as it was"
            )
        group.update(found[0])


def _select_optimizer(optimizer: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, Any]:
    known = {name for group in optimizer["groups"] for name in group["parameters"]}
    stored_as = {name: stored for name, stored in source.items() if stored in known}
    return {
        "state": {name: optimizer["state"][s] for name, s in stored_as.items() if s in optimizer["state"]},
        "groups": [
            {"parameters": own, "settings": group["settings"]}
            for group in optimizer["groups"]
            if (own := [name for name, stored in stored_as.items() if stored in group["parameters"]])
        ],
    }


def _moved_groups(state: StageState, number: int) -> StageState:
    """`state` with the tensors of its optimiser's groups under names of their own, for there may be such in others."""
    prefix = f"{OPTIMIZER}group/"
    renamed = {name: f"{OPTIMIZER}group/s{number}/{name.removeprefix(prefix)}" for name in state.tensors}
    renamed = {name: new for name, new in renamed.items() if name.startswith(prefix)}
    tensors = {renamed.get(name, name): tensor for name, tensor in state.tensors.items()}
    settings = {**state.settings, "optimizer": _renamed(state.settings["optimizer"], renamed)}
    return StageState(tensors=tensors, aliases=state.aliases, transient=state.transient, settings=settings)


def without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimiser's group."""
    return {name: value for name, value in group.items() if name != "params"}


def flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as plain JSON, its tensors put into `tensors` under `name` and where in `value` they are."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: flatten(item, f"{name}/{key}", tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        items = [flatten(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    raise ModelError(
        f"the optimiser keeps a {type(value).__name__} ({name}), which a checkpoint cannot hold: "
        "it must keep tensors, numbers, texts, lists, tuples and dictionaries by text"
    )


def build(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`; tensors are copied."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    match kind:
        case "tensor":
            return tensors[content].clone()
        case "dict":
            return {key: build(item, tensors) for key, item in content.items()}
        case "list":
            return [build(item, tensors) for item in content]
        case "tuple":
            return tuple(build(item, tensors) for item in content)
        case _:
            raise TypeError(f"unknown kind {kind!r}")


def _references(plain: Any) -> Iterator[str]:
    """The names of the tensors that flattened data refers to."""
    if isinstance(plain, dict):
        if plain.keys() == {"tensor"} and isinstance(plain["tensor"], str):
            yield plain["tensor"]
        else:
            yield from _references(list(plain.values()))
    elif isinstance(plain, list):
        for item in plain:
            yield from _references(item)


def _renamed(plain: Any, names: Mapping[str, str]) -> Any:
    """Flattened data with other references."""
    if isinstance(plain, list):
        return [_renamed(item, names) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {"tensor"} and isinstance(plain["tensor"], str):
        return {"tensor": names.get(plain["tensor"], plain["tensor"])}
    return {key: _renamed(item, names) for key, item in plain.items()}
