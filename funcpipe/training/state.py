"""The state of a stage, as tensors and plain JSON: its parameters, buffers, optimiser state and loss scale.

`capture_state` reads it from a stage and `restore_state` writes it back. `merge_stages` joins the states of all stages
into that of the whole model, and `select_for_stage` takes from it what a stage needs, however the model is cut now. So
a run can be resumed under another plan.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core.texts import error_text
from funcpipe.errors import CorruptMessage, ModelError, PlanError
from funcpipe.model.split import StageModule
from funcpipe.model.split.module_state import Attributes, decode_attributes, read_attributes, write_attributes
from funcpipe.model.split.stage import of_loss, of_model
from funcpipe.model.tensors import named_tensors
from funcpipe.training.device import Device
from funcpipe.training.norms import GradientNorm, LossScale
from funcpipe.training.optimizers import (
    OPTIMIZER,
    capture_optimizer,
    join_tensors,
    rename_tensors,
    restore_optimizer,
    select_optimizer,
    tensor_names_in,
)
from funcpipe.training.state_dict import renamed, united

MODEL, AVERAGED = "model/", "averaged/"

OWN, ADDED, OUTER, THETA, MEASURED = "own/", "added/", "outer/", "theta/", "measured/"
"""The prefixes of what a replica that trains alone keeps by the names of tensors, see `local_steps`."""

_BY_NAME = (AVERAGED, OWN, ADDED, OUTER, THETA, MEASURED)

ATTRIBUTES = "attributes"
"""The setting that holds the Python attributes that forwards leave for the next ones, in stages that have any."""

SCHEDULER, AVERAGE = "scheduler", "average"
"""The settings of the learning-rate scheduler and of the average of the parameters, in runs that have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """`tensors` holds the model's tensors under "model/NAME" and the optimiser's under "optimizer/PARAMETER/…"; the
    average of a tensor over steps is under "averaged/NAME", and what a scheduler keeps under "scheduler/…". "own/NAME",
    "added/NAME", "measured/NAME" and "outer/NAME" are kept by replicas that train alone (`local_steps`).

    `aliases` maps a shared tensor's other names to the one it is stored under; `transient` names the buffers that are
    not in a `state_dict`. `settings` is plain JSON: the optimiser's state and parameter groups, the loss scale, the
    scheduler's state, how many steps the average is of, and the Python attributes that a forward leaves for the next
    one; tensors in those are under "state/…".
    """

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    transient: frozenset[str]
    settings: Mapping[str, Any]

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the stage's part of the model's `state_dict`, shared tensors under all their names."""
        return renamed(self.tensors, of_model(self._names({})))

    def averaged_state_dict(self) -> Mapping[str, Tensor]:
        """Return the same with the averages of what is averaged; nothing if there is no average."""
        return renamed(self.tensors, of_model(self._averaged()))

    def loss_state_dict(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the loss, under the names that they have there."""
        return dict(renamed(self.tensors, of_loss(self._names({}))))

    def averaged_loss_state_dict(self) -> dict[str, Tensor]:
        """Return the same with the averages of what is averaged; nothing if there is no average."""
        return dict(renamed(self.tensors, of_loss(self._averaged())))

    def optimizer_state_dict(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return what the optimiser keeps: tensors, and all else, by "state.PARAMETER.KEY" and
        "param_groups.PARAMETER.KEY", as `get_optimizer_state_dict` of `torch.distributed.checkpoint.state_dict` does
        with `flatten_optimizer_state_dict`. A tied parameter, which each of its stages keeps, is there once.

        Raises ModelError for an optimiser that keeps more for a parameter or a group than tensors and plain values.
        """
        saved = self.settings.get("optimizer") or {"state": {}, "groups": []}
        trees = {f"state.{name}": tree for name, tree in saved["state"].items()}
        for group in saved["groups"]:
            trees |= {f"param_groups.{name}": group["settings"] for name in group["parameters"]}
        for other, name in self.aliases.items():
            for kind in ("state", "param_groups") if f"param_groups.{name}" in trees else ():
                trees.pop(f"{kind}.{other}", None)
        places: dict[str, str] = {}
        others: dict[str, Any] = {}
        for name, tree in trees.items():
            for key, leaf in tree["dict"].items():
                found = [*tensor_names_in(leaf)]
                if found and leaf != {"tensor": found[0]}:
                    raise ModelError(
                        f"the optimiser keeps several tensors as {key!r} of {name}, which has no flat form"
                    )
                (places if found else others)[f"{name}.{key}"] = found[0] if found else join_tensors(leaf, {})
        return renamed(self.tensors, places), others

    def _averaged(self) -> dict[str, str]:
        averaged = {name.removeprefix(AVERAGED): name for name in self.tensors if name.startswith(AVERAGED)}
        return self._names(averaged) if averaged else {}

    def _names(self, changed: Mapping[str, str]) -> dict[str, str]:
        """Map each name of the model, and of the loss, to that of its tensor."""
        held = {name.removeprefix(MODEL): name for name in self.tensors if name.startswith(MODEL)} | dict(changed)
        held |= {alias: held[name] for alias, name in self.aliases.items()}
        return {name: place for name, place in held.items() if name not in self.transient}

    def attributes(self) -> Attributes:
        """The Python attributes that a forward leaves for the next one. Raises CorruptMessage if they are not."""
        return of_model(self._attributes())

    def loss_attributes(self) -> Attributes:
        """Return those that a call of the loss leaves for the next one."""
        return of_loss(self._attributes())

    def _attributes(self) -> Attributes:
        with mismatch_is_corrupt():
            return decode_attributes(self.settings.get(ATTRIBUTES, {}), self.tensors)


def capture_state(stage: nn.Module, optimizer: torch.optim.Optimizer | None, norm: GradientNorm) -> StageState:
    """The state of `stage`, its tensors not copied. Raises ModelError if the optimiser's state is not plain data."""
    names, aliases = tensor_names(stage)
    saved = _changing(stage, names)
    tensors = {MODEL + name: tensor.detach() for name, tensor in saved.items()}
    name_of = {id(tensor): name for name, tensor in names.items()}
    settings: dict[str, Any] = {"optimizer": None, "loss_scale": None}
    if isinstance(stage, StageModule) and stage.carried.blocks:
        settings[ATTRIBUTES] = read_attributes(stage, stage.carried.blocks, stage.carried.attributes, tensors)
    if optimizer is not None:
        settings["optimizer"] = capture_optimizer(optimizer, name_of, tensors)
    if norm.loss_scale is not None:
        settings["loss_scale"] = [norm.loss_scale.factor, norm.loss_scale.good_steps]
    aliases = {alias: name for alias, name in aliases.items() if name in saved}
    return StageState(tensors=tensors, aliases=aliases, transient=_transient(stage) & saved.keys(), settings=settings)


def _changing(stage: nn.Module, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors of `stage` that a state holds: all but what is fixed, and as it was."""
    if not isinstance(stage, StageModule):
        return dict(names)
    return {name: tensor for name, tensor in names.items() if not stage.is_fixed(name, tensor)}


def restore_state(
    state: StageState, stage: nn.Module, optimizer: torch.optim.Optimizer | None, norm: GradientNorm
) -> None:
    """Write `state` back into `stage`, its optimiser and its loss scale. Raises CorruptMessage if it does not fit."""
    names, _ = tensor_names(stage)
    changing = _changing(stage, names)
    with mismatch_is_corrupt():
        with torch.no_grad():
            for name, tensor in names.items():
                if name in changing or MODEL + name in state.tensors:
                    tensor.copy_(state.tensors[MODEL + name])
        if isinstance(stage, StageModule) and stage.carried.blocks:
            write_attributes(stage, decode_attributes(state.settings[ATTRIBUTES], state.tensors))
        if optimizer is not None and state.settings["optimizer"] is not None:
            name_of = {id(tensor): name for name, tensor in names.items()}
            restore_optimizer(state.settings["optimizer"], optimizer, name_of, state.tensors)
        if norm.loss_scale is not None and state.settings["loss_scale"] is not None:
            norm.loss_scale = LossScale(*state.settings["loss_scale"])


def on_device(state: StageState, device: Device) -> StageState:
    """Return `state`, which is the host's, with what an optimiser keeps on `device`; torch has numbers, such as the
    count of its steps, on the host.
    """
    if device.is_host:
        return state  # whose tensors may only be opened
    kept = {name: tensor for name, tensor in state.tensors.items() if name.startswith(OPTIMIZER) and tensor.dim()}
    return replace(state, tensors={**state.tensors, **device.to_device(kept)})


@contextlib.contextmanager
def mismatch_is_corrupt() -> Iterator[None]:
    """Turn the errors of writing a state into a stage that it does not fit into CorruptMessage."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptMessage(f"a checkpoint does not match its stage: {error_text(error)}") from error


def with_settings(state: StageState, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StageState:
    """Return `state` with more settings and tensors."""
    return replace(state, settings={**state.settings, **settings}, tensors={**state.tensors, **tensors})


def merge_stages(states: Sequence[StageState]) -> StageState:
    """Return the state of the whole model, from the states of all its stages in order."""
    kept = [state.settings["optimizer"] for state in states if state.settings["optimizer"] is not None]
    moved = [_with_stage_in_group_names(state, number) for number, state in enumerate(states)]
    optimizers = [state.settings["optimizer"] for state in moved if state.settings["optimizer"] is not None]
    groups = [group for optimizer in optimizers for group in optimizer["groups"]]
    optimizer = {"state": {n: s for part in kept for n, s in part["state"].items()}, "groups": groups}
    settings: dict[str, Any] = {"optimizer": optimizer if kept else None}
    settings["loss_scale"] = states[0].settings["loss_scale"]
    attributes = {path: tree for state in states for path, tree in state.settings.get(ATTRIBUTES, {}).items()}
    shared = (SCHEDULER, AVERAGE)  # the same in all stages that have it
    settings |= {name: state.settings[name] for state in states for name in shared if name in state.settings}
    return StageState(
        tensors=united(state.tensors for state in moved),
        aliases={alias: name for state in states for alias, name in state.aliases.items()},
        transient=frozenset[str]().union(*(state.transient for state in states)),
        settings={**settings, **({ATTRIBUTES: attributes} if attributes else {})},
    )


def select_for_stage(whole: StageState, stage: nn.Module) -> StageState:
    """The part of `whole` that `stage` needs, under the stage's names. Raises PlanError if something is missing."""
    names, aliases = tensor_names(stage)
    source = {name: name if MODEL + name in whole.tensors else whole.aliases.get(name, name) for name in names}
    changing, held = _changing(stage, names), {n: s for n, s in source.items() if MODEL + s in whole.tensors}
    missing = [name for name in changing if name not in held]
    if missing:
        raise PlanError(f"the checkpoints are of another model: they do not hold {missing[0]!r}")
    for name, there in held.items():
        stored, tensor = whole.tensors[MODEL + there], names[name]
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise PlanError(
                f"the checkpoints are of another model: {name!r} has shape {list(stored.shape)} of {stored.dtype} "
                f"there, {list(tensor.shape)} of {tensor.dtype} here"
            )
    places = {MODEL + name: MODEL + stored for name, stored in held.items()}
    optimizer = whole.settings["optimizer"]
    if optimizer is not None:
        optimizer = select_optimizer(optimizer, source)
    settings = {**whole.settings, "optimizer": optimizer}
    settings.pop(ATTRIBUTES, None)
    places |= {name: name for part in settings.values() for name in tensor_names_in(part)}
    named = ((prefix + name, prefix + stored) for prefix in _BY_NAME for name, stored in source.items())
    places |= {name: stored for name, stored in named if stored in whole.tensors}
    if isinstance(stage, StageModule) and stage.carried.blocks:
        settings[ATTRIBUTES] = _select_attributes(whole, stage.carried.blocks)
        places |= {name: name for name in tensor_names_in(settings[ATTRIBUTES])}
    tensors, aliases = renamed(whole.tensors, places), {a: name for a, name in aliases.items() if name in held}
    return StageState(tensors=tensors, aliases=aliases, transient=_transient(stage) & held.keys(), settings=settings)


def settings_to_text(settings: Mapping[str, Any]) -> str:
    """Return `settings` as JSON text."""
    return json.dumps(settings, separators=(",", ":"))


def settings_from_text(text: str) -> Mapping[str, Any]:
    """Return the inverse; raises CorruptMessage."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptMessage(f"the settings of a checkpoint are not JSON: {error}") from error
    optional = {ATTRIBUTES, SCHEDULER, AVERAGE}
    if not isinstance(settings, dict) or settings.keys() - optional != {"optimizer", "loss_scale"}:
        raise CorruptMessage("the settings of a checkpoint must hold an optimizer and a loss_scale")
    return settings


def tensor_names(stage: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the parameters and buffers of `stage` by their first name; and any other name that the model has for them,
    held by the stage or not, mapped to the first.
    """
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
    if isinstance(stage, StageModule):
        aliases |= {other: aliases.get(name, name) for other, name in stage.other_names.items()}
    return names, aliases


def _transient(stage: nn.Module) -> frozenset[str]:
    buffers = {name for name, _ in stage.named_buffers(remove_duplicate=False)}
    return frozenset(buffers - named_tensors(stage).keys())


def _select_attributes(whole: StageState, blocks: Sequence[str]) -> dict[str, Any]:
    saved = whole.settings.get(ATTRIBUTES, {})
    missing = [path for path in blocks if path not in saved]
    if missing:
        raise PlanError(f"the checkpoints are of another model: they do not hold the attributes of {missing[0]!r}")
    return {path: saved[path] for path in blocks}


def _with_stage_in_group_names(state: StageState, number: int) -> StageState:
    """Return `state` with its groups' tensors renamed after the stage: other stages have groups of the same numbers."""
    prefix = f"{OPTIMIZER}group/"
    moved = {name: f"{OPTIMIZER}group/s{number}/{name.removeprefix(prefix)}" for name in state.tensors}
    moved = {name: new for name, new in moved.items() if name.startswith(prefix)}
    tensors = renamed(state.tensors, {moved.get(name, name): name for name in state.tensors})
    settings = {**state.settings, "optimizer": rename_tensors(state.settings["optimizer"], moved)}
    return StageState(tensors=tensors, aliases=state.aliases, transient=state.transient, settings=settings)
