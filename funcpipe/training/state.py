"""What a stage has learned, as tensors and plain JSON: its parameters, buffers, optimiser state and loss scale.

`capture_state` reads it from a stage and `restore_state` writes it back. `merge_stages` joins the states of all stages
into that of the whole model, and `select_for_stage` takes from it what a stage needs, however the model is cut now. So
a run can be resumed under another plan.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import CorruptMessage, PlanError
from funcpipe.model.split import StageModule
from funcpipe.model.split.module_state import Attributes, decode_attributes, read_attributes, write_attributes
from funcpipe.model.tensors import named_tensors
from funcpipe.training.norms import GradientNorm, LossScale
from funcpipe.training.state_tree import join_tensors, rename_tensors, split_tensors, tensor_names_in

MODEL, OPTIMIZER = "model/", "optimizer/"

ATTRIBUTES = "attributes"
"""The setting that holds the Python attributes that forwards leave for the next ones, in stages that have any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """`tensors` holds the model's tensors under "model/NAME" and the optimiser's under "optimizer/PARAMETER/…".

    `aliases` maps a shared tensor's other names to the one it is stored under; `transient` names the buffers that are
    not in a `state_dict`. `settings` is plain JSON: the optimiser's state and parameter groups, the loss scale, and the
    Python attributes that a forward leaves for the next one; tensors in those are under "state/…".
    """

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    transient: frozenset[str]
    settings: Mapping[str, Any]

    def state_dict(self) -> dict[str, Tensor]:
        """The stage's part of the model's `state_dict`, shared tensors under all their names."""
        names = [name.removeprefix(MODEL) for name in self.tensors if name.startswith(MODEL)]
        held = {name: self.tensors[MODEL + name] for name in names}
        held |= {alias: held[name] for alias, name in self.aliases.items()}
        return {name: tensor for name, tensor in held.items() if name not in self.transient}

    def attributes(self) -> Attributes:
        """The Python attributes that a forward leaves for the next one. Raises CorruptMessage if they are not."""
        with mismatch_is_corrupt():
            return decode_attributes(self.settings.get(ATTRIBUTES, {}), self.tensors)


def capture_state(stage: nn.Module, optimizer: torch.optim.Optimizer | None, norm: GradientNorm) -> StageState:
    """The state of `stage`, its tensors not copied. Raises ModelError if the optimiser's state is not plain data."""
    names, aliases = tensor_names(stage)
    tensors = {MODEL + name: tensor.detach() for name, tensor in names.items()}
    name_of = {id(tensor): name for name, tensor in names.items()}
    settings: dict[str, Any] = {"optimizer": None, "loss_scale": None}
    if isinstance(stage, StageModule) and stage.carried.blocks:
        settings[ATTRIBUTES] = read_attributes(stage, stage.carried.blocks, stage.carried.attributes, tensors)
    if optimizer is not None:
        settings["optimizer"] = {
            "state": {
                name_of[id(p)]: split_tensors(state, f"{OPTIMIZER}{name_of[id(p)]}", tensors)
                for p, state in optimizer.state.items()
            },
            "groups": [
                {
                    "parameters": [name_of[id(p)] for p in group["params"]],
                    "settings": split_tensors(group_settings(group), f"{OPTIMIZER}group/{i}", tensors),
                }
                for i, group in enumerate(optimizer.param_groups)
            ],
        }
    if norm.loss_scale is not None:
        settings["loss_scale"] = [norm.loss_scale.factor, norm.loss_scale.good_steps]
    return StageState(tensors=tensors, aliases=aliases, transient=_transient(stage), settings=settings)


def restore_state(
    state: StageState, stage: nn.Module, optimizer: torch.optim.Optimizer | None, norm: GradientNorm
) -> None:
    """Write `state` back into `stage`, its optimiser and its loss scale. Raises CorruptMessage if it does not fit."""
    names, _ = tensor_names(stage)
    with mismatch_is_corrupt():
        with torch.no_grad():
            for name, tensor in names.items():
                tensor.copy_(state.tensors[MODEL + name])
        if isinstance(stage, StageModule) and stage.carried.blocks:
            write_attributes(stage, decode_attributes(state.settings[ATTRIBUTES], state.tensors))
        if optimizer is not None:
            _restore_optimizer(state, optimizer, {id(tensor): name for name, tensor in names.items()})
        if norm.loss_scale is not None and state.settings["loss_scale"] is not None:
            norm.loss_scale = LossScale(*state.settings["loss_scale"])


@contextlib.contextmanager
def mismatch_is_corrupt() -> Iterator[None]:
    """Turn the errors of writing a state into a stage that it does not fit into CorruptMessage."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptMessage(f"a checkpoint does not match its stage: {type(error).__name__}: {error}") from error


def merge_stages(states: Sequence[StageState]) -> StageState:
    """The state of the whole model, from the states of all its stages in order."""
    kept = [state.settings["optimizer"] for state in states if state.settings["optimizer"] is not None]
    tensors: dict[str, Tensor] = {}
    groups: list[Any] = []
    for number, state in enumerate(states):
        moved = _with_stage_in_group_names(state, number)
        tensors |= moved.tensors
        groups += moved.settings["optimizer"]["groups"] if moved.settings["optimizer"] is not None else []
    optimizer = {"state": {n: s for part in kept for n, s in part["state"].items()}, "groups": groups}
    settings = {"optimizer": optimizer if kept else None, "loss_scale": states[0].settings["loss_scale"]}
    attributes = {path: tree for state in states for path, tree in state.settings.get(ATTRIBUTES, {}).items()}
    return StageState(
        tensors=tensors,
        aliases={alias: name for state in states for alias, name in state.aliases.items()},
        transient=frozenset[str]().union(*(state.transient for state in states)),
        settings={**settings, **({ATTRIBUTES: attributes} if attributes else {})},
    )


def select_for_stage(whole: StageState, stage: nn.Module) -> StageState:
    """The part of `whole` that `stage` needs, under the stage's names. Raises PlanError if something is missing."""
    names, aliases = tensor_names(stage)
    source = {name: name if MODEL + name in whole.tensors else whole.aliases.get(name, name) for name in names}
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
        tensors |= {name: whole.tensors[name] for name in tensor_names_in(optimizer)}
    settings = {"optimizer": optimizer, "loss_scale": whole.settings["loss_scale"]}
    if isinstance(stage, StageModule) and stage.carried.blocks:
        settings[ATTRIBUTES] = _select_attributes(whole, stage.carried.blocks)
        tensors |= {name: whole.tensors[name] for name in tensor_names_in(settings[ATTRIBUTES])}
    return StageState(tensors=tensors, aliases=aliases, transient=_transient(stage), settings=settings)


def settings_to_text(settings: Mapping[str, Any]) -> str:
    """`settings` as JSON text."""
    return json.dumps(settings, separators=(",", ":"))


def settings_from_text(text: str) -> Mapping[str, Any]:
    """The inverse; raises CorruptMessage."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptMessage(f"the settings of a checkpoint are not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.keys() - {ATTRIBUTES} != {"optimizer", "loss_scale"}:
        raise CorruptMessage("the settings of a checkpoint must hold an optimizer and a loss_scale")
    return settings


def tensor_names(stage: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters and buffers of `stage` by their first name; and any other name that the model has for them, held
    by the stage or not, mapped to the first.
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


def _restore_optimizer(state: StageState, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    saved = state.settings["optimizer"]
    if saved is None:
        return
    restore_groups(state, optimizer, [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups])
    for group in optimizer.param_groups:
        for p in group["params"]:
            if name_of[id(p)] in saved["state"]:
                optimizer.state[p] = join_tensors(saved["state"][name_of[id(p)]], state.tensors)


def restore_groups(state: StageState, optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> None:
    """Give the parameter groups of `optimizer` their saved settings; `names` lists each group's parameters by name."""
    groups = state.settings["optimizer"]["groups"]
    settings_of = {name: group["settings"] for group in groups for name in group["parameters"]}
    for group, own in zip(optimizer.param_groups, names, strict=True):
        found = [join_tensors(settings_of[name], state.tensors) for name in own]
        if any(other != found[0] for other in found):
            raise PlanError(
                "parameters that had different optimiser settings are now in one group; keep the optimiser as it was"
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


def _select_attributes(whole: StageState, blocks: Sequence[str]) -> dict[str, Any]:
    saved = whole.settings.get(ATTRIBUTES, {})
    missing = [path for path in blocks if path not in saved]
    if missing:
        raise PlanError(f"the checkpoints are of another model: they do not hold the attributes of {missing[0]!r}")
    return {path: saved[path] for path in blocks}


def _with_stage_in_group_names(state: StageState, number: int) -> StageState:
    """`state` with its groups' tensors renamed after the stage: other stages have groups of the same numbers."""
    prefix = f"{OPTIMIZER}group/"
    renamed = {name: f"{OPTIMIZER}group/s{number}/{name.removeprefix(prefix)}" for name in state.tensors}
    renamed = {name: new for name, new in renamed.items() if name.startswith(prefix)}
    tensors = {renamed.get(name, name): tensor for name, tensor in state.tensors.items()}
    settings = {**state.settings, "optimizer": rename_tensors(state.settings["optimizer"], renamed)}
    return StageState(tensors=tensors, aliases=state.aliases, transient=state.transient, settings=settings)


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}
