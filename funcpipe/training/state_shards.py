"""The state of a stage whose optimiser is divided over its replicas: each replica saves its own shard of it.

A shard is a `StageState` that holds the whole model, and the optimiser's state for the replica's own segments of the
parameters only. Of a parameter of 10 elements of which this replica updates the last 6, `settings["optimizer"]` has

    {"shards": {"layer.weight": [[4, 10, {"dict": {"exp_avg": {"tensor": "optimizer/layer.weight/4/exp_avg"}}}]]}}

The shards of all replicas after the same step are combined by `combine_shards`; `unshard` then gives the form of an
optimiser that is not divided, which any plan can start from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import CorruptMessage
from funcpipe.model.split.module_state import PREFIX
from funcpipe.training.norms import GradientNorm
from funcpipe.training.residuals import RESIDUAL, without_residuals
from funcpipe.training.sharding import ShardedOptimizer, cut_state
from funcpipe.training.state import (
    AVERAGED,
    MODEL,
    SCHEDULER,
    StageState,
    capture_state,
    mismatch_is_corrupt,
    restore_state,
    tensor_names,
)
from funcpipe.training.state_groups import OPTIMIZER, capture_groups, restore_groups
from funcpipe.training.state_tree import join_tensors, split_tensors


def capture_shard(stage: nn.Module, sharded: ShardedOptimizer, norm: GradientNorm) -> StageState:
    """One replica's shard; its tensors are not copied. Raises ModelError if the optimiser's state is not plain data."""
    state = capture_state(stage, None, norm)
    tensors = dict(state.tensors)
    name_of = _name_of(stage)
    shards: dict[str, list[Any]] = {}
    for segment in sharded.segments:
        kept = sharded.optimizer.state.get(segment.proxy)
        if kept:
            name = name_of[id(segment.parameter)]
            plain = split_tensors(kept, f"{OPTIMIZER}{name}/{segment.start}", tensors)
            shards.setdefault(name, []).append([segment.start, segment.stop, plain])
    names = [[name_of[id(p)] for p in parameters] for parameters in sharded.groups]
    groups = capture_groups(sharded.optimizer, names, tensors)
    settings = {**state.settings, "optimizer": {"state": {}, "groups": groups, "shards": shards}}
    return replace(state, tensors=tensors, settings=settings)


def without_model(shard: StageState, *, sharded: bool = True) -> StageState:
    """Return `shard` without the model's tensors and their averages, which another replica saves.

    Unless the optimiser is `sharded`, nothing but this replica's residuals is left.
    """
    if not sharded:
        return replace(shard, tensors={name: t for name, t in shard.tensors.items() if name.startswith(RESIDUAL)})
    tensors = {name: t for name, t in shard.tensors.items() if not name.startswith((MODEL, AVERAGED))}
    return replace(shard, tensors=tensors)


def combine_shards(shards: Sequence[StageState]) -> StageState:
    """Several replicas' shards of the same step as one; a single state is returned as it is, shard or not."""
    if len(shards) == 1:
        return shards[0]
    tensors: dict[str, Tensor] = {}
    segments: dict[str, list[Any]] = {}
    with mismatch_is_corrupt():
        for shard in shards:
            tensors |= shard.tensors
            for name, found in ((shard.settings["optimizer"] or {}).get("shards", {})).items():
                segments.setdefault(name, []).extend(found)
        if "shards" not in (shards[0].settings["optimizer"] or {}):
            return replace(shards[0], tensors=tensors)
        optimizer = {**shards[0].settings["optimizer"], "shards": segments}
    return replace(shards[0], tensors=tensors, settings={**shards[0].settings, "optimizer": optimizer})


def unshard(combined: StageState) -> StageState:
    """Return the shards of all replicas, combined, in the form of an optimiser that is not divided.

    A state that is no shard is returned as it is, but without residuals. Raises CorruptMessage if a segment is missing.
    """
    combined = without_residuals(combined)
    optimizer = combined.settings["optimizer"]
    if optimizer is None or "shards" not in optimizer:
        return combined
    kept = (MODEL, AVERAGED, f"{SCHEDULER}/", PREFIX, f"{OPTIMIZER}group/")
    tensors = {name: t for name, t in combined.tensors.items() if name.startswith(kept)}
    state = {}
    with mismatch_is_corrupt():
        for name, segments in optimizer["shards"].items():
            in_order = sorted(segments, key=lambda segment: segment[0])
            joined = _joined(in_order, combined.tensors[MODEL + name], combined.tensors)
            state[name] = split_tensors(joined, f"{OPTIMIZER}{name}", tensors)
    plain = {"state": state, "groups": optimizer["groups"]}
    return replace(combined, tensors=tensors, settings={**combined.settings, "optimizer": plain})


def restore_shard(state: StageState, stage: nn.Module, sharded: ShardedOptimizer, norm: GradientNorm) -> None:
    """Write `state` back into `stage`, its optimiser and its loss scale: this replica's shard, or a whole state.

    Raises CorruptMessage if it does not fit.
    """
    restore_state(state, stage, None, norm)
    saved = state.settings["optimizer"]
    if saved is None:
        return
    name_of = _name_of(stage)
    with mismatch_is_corrupt():
        names = [[name_of[id(p)] for p in own] for own in sharded.groups]
        restore_groups(saved["groups"], sharded.optimizer, names, state.tensors)
        shards = saved.get("shards", {})
        for segment in sharded.segments:
            name = name_of[id(segment.parameter)]
            if name in shards:
                own = {(start, stop): plain for start, stop, plain in shards[name]}
                plain = own[segment.start, segment.stop]
                sharded.optimizer.state[segment.proxy] = join_tensors(plain, state.tensors)
            elif name in saved["state"]:
                kept = join_tensors(saved["state"][name], state.tensors)
                sharded.optimizer.state[segment.proxy] = {key: cut_state(value, segment) for key, value in kept.items()}


def _joined(segments: Sequence[Any], parameter: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimiser's state of a parameter, from the [start, stop, state] of all its segments in ascending order."""
    ends = [0, *(stop for _, stop, _ in segments)]
    if [start for start, _, _ in segments] != ends[:-1] or ends[-1] != parameter.numel():
        raise CorruptMessage("a checkpoint holds the optimiser's state of only some elements of a parameter")
    kept = [join_tensors(plain, tensors) for _, _, plain in segments]
    if len(kept) == 1:
        return dict(kept[0])
    sizes = [torch.Size([stop - start]) for start, stop, _ in segments]
    joined = {}
    for key, first in kept[0].items():
        values = [one[key] for one in kept]
        cut = all(isinstance(v, Tensor) and v.shape == size for v, size in zip(values, sizes, strict=True))
        joined[key] = torch.cat(values).view(parameter.shape) if cut else first
    return joined


def _name_of(stage: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in tensor_names(stage)[0].items()}
