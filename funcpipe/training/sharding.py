"""An optimiser divided over the replicas of a stage: each replica updates its own split of the parameters, and keeps
the optimiser's state for that split only.

This is ZeRO stage 1 (Rajbhandari et al., SC 2020) on top of a scatter-reduce through storage. A replica that has summed
its piece of the gradients updates the parameters in that piece at once and sends them on in place of the sums. With two
replicas and one round, of a flat vector of 8 elements:

    replica 0 sums [0, 4), updates parameters [0, 4), writes them; reads the updated [4, 8)
    replica 1 sums [4, 8), updates parameters [4, 8), writes them; reads the updated [0, 4)

It works for optimisers that update each element independently of all others, which `optimizer_division` tries out.

Each replica saves its own shard: a `StageState` that holds the whole model, and the optimiser's state for the replica's
own segments of the parameters only. Of a parameter of 10 elements of which this replica updates the last 6,
`settings["optimizer"]` has

    {"shards": {"layer.weight": [[4, 10, {"dict": {"exp_avg": {"tensor": "optimizer/layer.weight/4/exp_avg"}}}]]}}

The shards of all replicas after the same step are combined by `combine_shards`; `unshard` then gives the form of an
optimiser that is not divided, which any plan can start from.

Where gradients are summed in 8 bits, each replica has rounding errors of its own to save, "residual/1/sent" and
"residual/1/summed" of replica 1. A worker that is restarted or handed over goes on with them, to the bit. A run that is
resumed begins without, because the gradients may be cut otherwise then; so does a stage after a step that was left out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.comm.error_feedback import ErrorFeedback
from funcpipe.comm.gradient_chunks import cut_unit
from funcpipe.comm.int8_chunks import summed_ranges
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import Wire
from funcpipe.errors import CorruptMessage
from funcpipe.model.split.module_state import PREFIX
from funcpipe.training.device import HOST, Device
from funcpipe.training.gradients import Layout, is_absent
from funcpipe.training.local_steps import joined_parts
from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizers import (
    OPTIMIZER,
    capture_groups,
    join_tensors,
    restore_groups,
    split_tensors,
    tensor_names_in,
)
from funcpipe.training.state import (
    AVERAGED,
    MODEL,
    OUTER,
    SCHEDULER,
    THETA,
    StageState,
    capture_state,
    mismatch_is_corrupt,
    restore_state,
    tensor_names,
)
from funcpipe.training.state_dict import StateDict, renamed, united


class Segment:
    """The elements [start, stop) of a flattened parameter, which one replica updates.

    `proxy` is the parameter that the optimiser sees for them; it is empty between two updates.
    """

    def __init__(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        self.parameter = parameter
        self.start = start
        self.stop = stop
        whole = stop - start == parameter.numel()
        self.shape = parameter.shape if whole else torch.Size([stop - start])
        self.proxy = nn.Parameter(parameter.new_empty(0))

    def load(self, summed: Tensor | None) -> None:
        """Give the proxy the current values and the gradient `summed`; None if no replica has any."""
        self.proxy.data = self.cut(self.parameter.detach())
        self.proxy.grad = None if summed is None else summed.to(self.parameter.dtype).view(self.shape)

    def unload(self, updated: Tensor) -> None:
        """Write the proxy's updated values into `updated`, and empty it."""
        updated.copy_(self.proxy.detach().reshape(-1))
        self.proxy.grad = None
        self.proxy.data = self.parameter.new_empty(0)

    def cut(self, values: Tensor) -> Tensor:
        """Return a copy of these elements of `values`, which has the parameter's shape."""
        return values.reshape(-1)[self.start : self.stop].clone().view(self.shape)


class ShardedOptimizer:
    """The optimiser of one replica's split, which is one range of the flat vector in each round of synchronisation.

    `groups` holds all parameters of each parameter group, including those that other replicas update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        rounds: Sequence[tuple[int, int]],
        *,
        clip_grad_value: float | None = None,
        device: Device = HOST,
    ) -> None:
        """Takes over `optimizer`, which was made for whole parameters on `device`; `rounds` holds this replica's
        [start, stop).
        """
        self.optimizer = optimizer
        self._device = device
        self._clip_grad_value = clip_grad_value
        self.groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        self._rounds = [tuple(_segments(layout, start, stop)) for start, stop in rounds]
        self.segments = tuple(segment for in_round in self._rounds for _, segment in in_round)
        self._replace_parameters()

    def update(self, number: int, values: Tensor) -> None:
        """Replace this replica's summed gradients of round `number`, `values` on the host, by updated parameters.

        The model's own parameters do not change yet: a backward may still be using them.
        """
        have_gradient = [not is_absent(values[place]) for place, _ in self._rounds[number]]
        computed = self._device.receive({"": values})[""]
        for (place, segment), has_one in zip(self._rounds[number], have_gradient, strict=True):
            segment.load(computed[place] if has_one else None)
        if self._clip_grad_value is not None:
            nn.utils.clip_grad_value_([segment.proxy for _, segment in self._rounds[number]], self._clip_grad_value)
        if any(have_gradient):
            self.optimizer.step()
        for place, segment in self._rounds[number]:
            segment.unload(computed[place])
        if computed is not values:
            self._device.leave([(values, computed)], [self._device.computed()]).synchronize()

    def _replace_parameters(self) -> None:
        """Have the optimiser update the segments' proxies in place of the parameters."""
        of_parameter: dict[int, list[Segment]] = defaultdict(list)
        for segment in self.segments:
            of_parameter[id(segment.parameter)].append(segment)
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [segment.proxy for p in parameters for segment in of_parameter[id(p)]]
        initial = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for parameter, state in initial.items():
            for segment in of_parameter[id(parameter)]:
                self.optimizer.state[segment.proxy] = {
                    name: _cut_state(value, segment) for name, value in state.items()
                }


def _cut_state(value: Any, segment: Segment) -> Any:
    """One value of a parameter's optimiser state for a segment of it: cut if it has the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    return segment.cut(value) if value.shape == segment.parameter.shape else value.clone()


def _segments(layout: Layout, start: int, stop: int) -> Iterator[tuple[slice, Segment]]:
    """Yield the segments in [start, stop) of the flat vector, each with its place relative to `start`."""
    for number in layout.parameters_in(start, stop):
        place = layout.slice_of(number)
        first, last = max(start, place.start), min(stop, place.stop)
        segment = Segment(layout.parameters[number], first - place.start, last - place.start)
        yield slice(first - start, last - start), segment


def has_cut_state(sharded: ShardedOptimizer) -> bool:
    """Return True if the optimiser's state of a segment has its shape, or is one value for all of the parameter."""
    return all(
        value.shape in (torch.Size([]), segment.shape) if isinstance(value, Tensor) else not _is_nested(value)
        for segment in sharded.segments
        for value in sharded.optimizer.state[segment.proxy].values()
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


RESIDUAL = "residual/"


class Residuals:
    """The error feedback of `replica`, whose gradients lie as `layout` says and are summed as `pattern` says.

    Of replicas that train alone, it is that of a `fragment` of the parameters.
    """

    def __init__(self, layout: Layout, pattern: Pattern, replica: int, *, fragment: int = 0) -> None:
        ranges = summed_ranges(layout.elements, pattern, layout.head, replica)
        self.feedback = ErrorFeedback(layout.elements - layout.head, ranges)
        own = f"{RESIDUAL}{replica}/f{fragment}/" if fragment else f"{RESIDUAL}{replica}/"
        self._tensors = {own + "sent": self.feedback.sent, own + "summed": self.feedback.summed}
        self._held: dict[str, Tensor] = {}

    def hold(self) -> None:
        """Let the state have the residuals as they are now, until `release`: sums that a replica repeats begin so."""
        self._held = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def release(self) -> None:
        """Let the state have the residuals as they are then."""
        self._held = {}

    def added_to(self, state: StageState) -> StageState:
        """Return `state` with the residuals; their tensors are not copied."""
        return replace(state, tensors={**state.tensors, **(self._held or self._tensors)})

    def restore(self, state: StageState) -> None:
        """Go back to the residuals in `state`: 0 if it holds none. Raises CorruptMessage if they do not fit."""
        self.release()
        if not any(name.startswith(RESIDUAL) for name in state.tensors):
            self.feedback.clear()
            return
        with mismatch_is_corrupt():
            for name, tensor in self._tensors.items():
                tensor.copy_(state.tensors[name])


def residuals_of(layouts: Sequence[Layout], wire: Wire, pattern: Pattern | None, replica: int) -> dict[int, Residuals]:
    """Return the rounding errors of sums in 8 bits, by the number of the fragment; none of other sums."""
    rounded = {i: layout for i, layout in enumerate(layouts) if layout.dtype is torch.float32}
    if cut_unit(wire) == 1 or not rounded:
        return {}
    assert pattern is not None, "the pattern says what this replica sums"
    return {i: Residuals(layout, pattern, replica, fragment=i) for i, layout in rounded.items()}


def without_residuals(state: StageState) -> StageState:
    """Return `state` as a run that is resumed takes it."""
    kept = {name: name for name in state.tensors if not name.startswith(RESIDUAL)}
    return replace(state, tensors=renamed(state.tensors, kept))


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
    """Return `shard` without the model's tensors, their averages and the outer momentum, which another replica saves.

    Unless the optimiser is `sharded`, or each replica's own, nothing but this replica's residuals is left.
    """
    if not sharded:
        return replace(shard, tensors={name: t for name, t in shard.tensors.items() if name.startswith(RESIDUAL)})
    tensors = {name: t for name, t in shard.tensors.items() if not name.startswith((MODEL, AVERAGED, OUTER, THETA))}
    return replace(shard, tensors=tensors)


def combine_shards(shards: Sequence[StageState]) -> StageState:
    """Several replicas' shards of the same step as one; a single state is returned as it is, shard or not.

    What several have under the same name, such as optimisers of replicas that train alone, is that of the first.
    """
    if len(shards) == 1:
        return shards[0]
    tensors = united(shard.tensors for shard in reversed(shards))
    segments: dict[str, list[Any]] = {}
    with mismatch_is_corrupt():
        for shard in shards:
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
    combined = joined_parts(without_residuals(combined))
    optimizer = combined.settings["optimizer"]
    if optimizer is None or "shards" not in optimizer:
        return combined
    kept = (MODEL, AVERAGED, f"{SCHEDULER}/", PREFIX, f"{OPTIMIZER}group/")
    tensors = renamed(combined.tensors, {name: name for name in combined.tensors if name.startswith(kept)})
    state: dict[str, Any] = {}
    joined: dict[str, Callable[[], Tensor]] = {}
    with mismatch_is_corrupt():
        for name, segments in optimizer["shards"].items():
            in_order = sorted(segments, key=lambda segment: segment[0])
            first = in_order[0][2]["dict"]
            places = {key: f"{OPTIMIZER}{name}/{key}" for key, leaf in first.items() if [*tensor_names_in(leaf)]}
            state[name] = {"dict": first | {key: {"tensor": place} for key, place in places.items()}}
            joined |= {p: partial(_joined, name, key, in_order, combined.tensors) for key, p in places.items()}
    is_open = isinstance(tensors, StateDict)
    tensors = united([tensors, StateDict(joined) if is_open else {place: read() for place, read in joined.items()}])
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
                sharded.optimizer.state[segment.proxy] = {
                    key: _cut_state(value, segment) for key, value in kept.items()
                }


def _joined(name: str, key: str, segments: Sequence[Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """What the optimiser keeps as `key` for a parameter, from the [start, stop, state] of its segments in order."""
    parameter, ends = tensors[MODEL + name], [0, *(stop for _, stop, _ in segments)]
    if [start for start, _, _ in segments] != ends[:-1] or ends[-1] != parameter.numel():
        raise CorruptMessage("a checkpoint holds the optimiser's state of only some elements of a parameter")
    with mismatch_is_corrupt():
        values = [join_tensors(state["dict"][key], tensors) for _, _, state in segments]
    sizes = [torch.Size([stop - start]) for start, stop, _ in segments]
    is_cut = len(values) > 1 and [value.shape for value in values] == sizes
    return torch.cat(values).view(parameter.shape) if is_cut else values[0]


def _name_of(stage: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in tensor_names(stage)[0].items()}
