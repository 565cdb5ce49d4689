"""What the replicas of a stage have learned when its optimiser is divided over them: each holds a part.

A part holds the whole model and the optimiser's state of the replica's own segments, under `shards` of its settings: by
parameter, [start, stop, state]. Parts of the same step can be put together, into the form that any plan reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import CorruptMessage
from funcpipe.training import state as states
from funcpipe.training.norms import GradientNorm
from funcpipe.training.sharding import ShardedOptimizer, cut_state
from funcpipe.training.state import MODEL, OPTIMIZER, StageState


def take(stage: nn.Module, sharded: ShardedOptimizer, norm: GradientNorm) -> StageState:
    """One replica's part, without copying it. Raises ModelError if the optimiser keeps what is not data."""
    state = states.take(stage, None, norm)
    tensors = dict(state.tensors)
    name_of = _name_of(stage)
    shards: dict[str, list[Any]] = {}
    for segment in sharded.segments:
        kept = sharded.optimizer.state.get(segment.own)
        if kept:
            name = name_of[id(segment.parameter)]
            plain = states.flatten(kept, f"{OPTIMIZER}{name}/{segment.start}", tensors)
            shards.setdefault(name, []).append([segment.start, segment.stop, plain])
    groups = [
        {
            "parameters": [name_of[id(p)] for p in parameters],
            "settings": states.flatten(states.without_params(group), f"{OPTIMIZER}group/{i}", tensors),
        }
        for i, (group, parameters) in enumerate(zip(sharded.optimizer.param_groups, sharded.groups, strict=True))
    ]
    settings = {**state.settings, "optimizer": {"state": {}, "groups": groups, "shards": shards}}
    return replace(state, tensors=tensors, settings=settings)


def without_model(part: StageState) -> StageState:
    """What a part holds of the optimiser."""
    return replace(part, tensors={name: t for name, t in part.tensors.items() if not name.startswith(MODEL)})


def together(parts: Sequence[StageState]) -> StageState:
    """Parts of the same step as one part; a state that is no part stays as it is."""
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, Tensor] = {}
    shards: dict[str, list[Any]] = {}
    with states.matching():
        for part in parts:
            tensors |= part.tensors
            for name, found in part.settings["optimizer"]["shards"].items():
                shards.setdefault(name, []).extend(found)
        optimizer = {**parts[0].settings["optimizer"], "shards": shards}
    return replace(parts[0], tensors=tensors, settings={**parts[0].settings, "optimizer": optimizer})


def whole(part: StageState) -> StageState:
    """The parts of all replicas, put together, in the form of an optimiser that is not divided.

    Raises CorruptMessage if something is missing.
    """
    optimizer = part.settings["optimizer"]
    if optimizer is None or "shards" not in optimizer:
        return part
    tensors = {name: t for name, t in part.tensors.items() if name.startswith((MODEL, f"{OPTIMIZER}group/"))}
    state = {}
    with states.matching():
        for name, found in optimizer["shards"].items():
            joined = _joined(sorted(found, key=lambda shard: shard[0]), part.tensors[MODEL + name], part.tensors)
            state[name] = states.flatten(joined, f"{OPTIMIZER}{name}", tensors)
    plain = {"state": state, "groups": optimizer["groups"]}
    return replace(part, tensors=tensors, settings={**part.settings, "optimizer": plain})


def put_back(state: StageState, stage: nn.Module, sharded: ShardedOptimizer, norm: GradientNorm) -> None:
    """Make `stage`, its optimiser and its loss scale what they were, by this replica's part or by the whole state.

    Raises CorruptMessage if they do not match.
    """
    states.put_back(state, stage, None, norm)
    saved = state.settings["optimizer"]
    if saved is None:
        return
    name_of = _name_of(stage)
    with states.matching():
        states.put_back_groups(state, sharded.optimizer, [[name_of[id(p)] for p in own] for own in sharded.groups])
        shards = saved.get("shards", {})
        for segment in sharded.segments:
            name = name_of[id(segment.parameter)]
            if name in shards:
                own = {(start, stop): plain for start, stop, plain in shards[name]}
                plain = own[segment.start, segment.stop]
                sharded.optimizer.state[segment.own] = states.build(plain, state.tensors)
            elif name in saved["state"]:
                kept = states.build(saved["state"][name], state.tensors)
                sharded.optimizer.state[segment.own] = {key: cut_state(value, segment) for key, value in kept.items()}


def _joined(shards: Sequence[Any], parameter: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the optimiser keeps of a parameter, from what it keeps of all its segments, in ascending order."""
    ends = [0, *(stop for _, stop, _ in shards)]
    if [start for start, _, _ in shards] != ends[:-1] or ends[-1] != parameter.numel():
        raise CorruptMessage("a checkpoint holds the optimiser's state of some elements of a parameter only")
    kept = [states.build(plain, tensors) for _, _, plain in shards]
    if len(kept) == 1:
        return dict(kept[0])
    sizes = [torch.Size([stop - start]) for start, stop, _ in shards]
    joined = {}
    for key, first in kept[0].items():
        values = [one[key] for one in kept]
        cut = all(isinstance(v, Tensor) and v.shape == size for v, size in zip(values, sizes, strict=True))
        joined[key] = torch.cat(values).view(parameter.shape) if cut else first
    return joined


def _name_of(stage: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in states.names_of(stage)[0].items()}
