"""The optimiser's part of a stage's state: what it keeps for each parameter, and the settings of its groups.

Groups have the same numbers in every stage (see `optimizers`). A saved group holds its number, the names of those
parameters that the stage has, and its settings; so a stage finds the settings of all its groups, however the model is
cut, those too of groups that are empty there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from funcpipe.errors import ModelError, PlanError
from funcpipe.training.state_tree import join_tensors, split_tensors

OPTIMIZER = "optimizer/"
"""The prefix of the names of the optimiser's tensors."""

_NOT_SETTINGS = frozenset({"params", "param_names"})


def capture_optimizer(optimizer: Optimizer, name_of: Mapping[int, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of `optimizer` as JSON; its tensors go into `tensors`. `name_of` has each parameter's name by its id.

    Raises ModelError if it is not plain data.
    """
    strange = [type(key).__name__ for key in optimizer.state if id(key) not in name_of]
    if strange:
        raise ModelError(
            f"the optimiser keeps state for a {strange[0]} that is none of its parameters, which a checkpoint cannot "
            "hold; keep it for each parameter, or in the settings of the groups"
        )
    state = {
        name_of[id(p)]: split_tensors(kept, f"{OPTIMIZER}{name_of[id(p)]}", tensors)
        for p, kept in optimizer.state.items()
    }
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return {"state": state, "groups": capture_groups(optimizer, names, tensors)}


def restore_optimizer(
    saved: Mapping[str, Any], optimizer: Optimizer, name_of: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Go back to what `capture_optimizer` returned."""
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    restore_groups(saved["groups"], optimizer, names, tensors)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if name_of[id(p)] in saved["state"]:
                optimizer.state[p] = join_tensors(saved["state"][name_of[id(p)]], tensors)


def capture_groups(
    optimizer: Optimizer, names: Sequence[Sequence[str]], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the parameter groups as JSON; `names` lists each group's parameters by name."""
    return [
        {
            "number": number,
            "parameters": list(own),
            "settings": split_tensors(group_settings(group), f"{OPTIMIZER}group/{number}", tensors),
        }
        for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True))
    ]


def restore_groups(
    saved: Sequence[Mapping[str, Any]],
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Give the groups of `optimizer` their saved settings; `names` lists each group's parameters by name.

    Raises PlanError if the optimiser groups its parameters otherwise now.
    """
    settings_of = {name: group["settings"] for group in saved for name in group["parameters"]}
    for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        trees = [settings_of[name] for name in own]
        found = [group_settings(join_tensors(tree, tensors)) for tree in trees]
        if any(other != found[0] for other in found):
            raise PlanError(
                "parameters that had different optimiser settings are now in one group; keep the optimiser as it was"
            )
        empty = [one["settings"] for one in saved if one.get("number") == number]
        if not own and empty:
            found = [group_settings(join_tensors(empty[0], tensors))]
        if found:
            group.update(found[0])


def select_optimizer(saved: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a whole model's optimiser for a stage; `source` maps the stage's names to those in `saved`."""
    groups = saved["groups"]
    known = {name for group in groups for name in group["parameters"]}
    stored_as = {name: stored for name, stored in source.items() if stored in known}
    kept = []
    for group in groups:
        held = set(group["parameters"])
        if own := [name for name, stored in stored_as.items() if stored in held]:
            kept.append({**group, "parameters": own})
    numbers = {group.get("number") for group in kept}
    for group in groups:
        if group.get("number") not in numbers:
            numbers.add(group.get("number"))
            kept.append({**group, "parameters": []})
    return {"state": {n: saved["state"][s] for n, s in stored_as.items() if s in saved["state"]}, "groups": kept}


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS}
