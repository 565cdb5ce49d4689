"""Where a model may be cut into stages: its layers merged, what the user has pinned, and the borders that are left.

Merging makes one layer of light neighbours, so that a model of many small layers can be planned as one of a few. By
hand: layers weigh 5, 1, 4 (the largest share of seconds, parameters and activations), and the cuts between them send 10
and 90 bytes. To get two layers, the lightest one, in the middle, joins the neighbour with which it exchanges more
bytes: the last one. The cut that remains sends 10 bytes.

Pins are decisions of the user in terms of a profile's layers and a platform's sizes.

Borders. By hand: 6 layers, cuts pinned before layers 2 and 4, at most 3 stages. The stage [0, 1) is admitted by itself,
but a plan with it has at least 4 stages; what remains are [0, 2), [2, 4) and [4, 6):

    layers     0   1 | 2   3 | 4   5
    sections   0   0 | 1   1 | 2   2        every plan has a cut before layers 2 and 4
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import LayerProfile, ModelProfile, Pins, PlatformSpec, TensorProfile, TiedParameter, stages_of_layers
from funcpipe.core.accelerator import total
from funcpipe.core.cached import cached_property
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.cost import Array


def merge_layers(profile: ModelProfile, limit: int, *, keep: Collection[int] = ()) -> ModelProfile:
    """`profile` with at most `limit` layers; each names in `parts` the layers that it was made from.

    The cuts before the layers `keep` stay possible, even if that takes more layers than `limit`. Raises InvalidValue
    for a limit below 1.

    Repeatedly, the lightest layer joins the neighbour with which it exchanges more bytes (the lighter one of equals). A
    layer's weight is the largest of its shares of the model's seconds, parameters and activations. So the cuts that
    remain send few bytes, and the layers between them are of similar weight. Sums of seconds and bytes do not change;
    tensors inside a merged layer vanish, the others stay separate, each with its own consumers.
    """
    if limit < 1:
        raise InvalidValue("limit", limit, "must be at least 1")
    groups = _groups(profile, limit, frozenset(keep))
    if len(groups) == len(profile.layers):
        return profile
    group_of = stages_of_layers(groups)
    layers = tuple(_merged(profile, first, stop) for first, stop in groups)
    return replace(
        profile, layers=layers, tensors=_remapped(profile.tensors, group_of), ties=_remapped_ties(profile, group_of)
    )


def crossing_bytes(profile: ModelProfile) -> Array:
    """Element i: the bytes, both ways, of the tensors that a cut before layer i would send."""
    crossing = np.zeros(len(profile.layers) + 1)
    for tensor in profile.tensors:
        crossing[tensor.producer + 1 : tensor.consumers[-1] + 1] += tensor.forward_bytes + tensor.backward_bytes
    return crossing


def _groups(profile: ModelProfile, limit: int, keep: frozenset[int]) -> list[tuple[int, int]]:
    crossing, totals = crossing_bytes(profile), list(_weights(profile))
    crossing[[0, -1, *keep]] = -1.0  # never given up
    carried: list[float] = crossing.tolist()
    heaviest = [float(total.max()) for total in totals]
    groups = [(i, i + 1) for i in range(len(profile.layers))]
    while len(groups) > limit:
        joinable = [i for i, (first, stop) in enumerate(groups) if carried[first] >= 0 or carried[stop] >= 0]
        if not joinable:
            break
        light = min(joinable, key=heaviest.__getitem__)
        sides = [side for side in (light - 1, light + 1) if 0 <= side < len(groups)]
        other = max(sides, key=lambda side: (carried[groups[max(side, light)][0]], -heaviest[side]))
        left, right = min(light, other), max(light, other)
        groups[left : right + 1] = [(groups[left][0], groups[right][1])]
        totals[left : right + 1] = [totals[left] + totals[right]]
        heaviest[left : right + 1] = [float(totals[left].max())]
    return groups


def _weights(profile: ModelProfile) -> Array:
    """A row for each layer: its shares of the model's seconds, parameters and activations."""
    rows = np.array(
        [
            (sum(layer.forward_s) + sum(layer.backward_s), layer.parameter_bytes, layer.activation_bytes)
            for layer in profile.layers
        ],
        dtype=np.float64,
    )
    totals = rows.sum(axis=0)
    shares: Array = rows / np.where(totals > 0, totals, 1.0)
    return shares


def _merged(profile: ModelProfile, first: int, stop: int) -> LayerProfile:
    layers = profile.layers[first:stop]
    if len(layers) == 1:
        return layers[0]
    return replace(
        layers[0],
        name=f"{layers[0].name}..{layers[-1].name}",
        parameter_bytes=profile.parameter_bytes(first, stop),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        forward_s=_sums([layer.forward_s for layer in layers]),
        backward_s=_sums([layer.backward_s for layer in layers]),
        constant_bytes=sum(layer.constant_bytes for layer in layers),
        input_bytes=sum(layer.input_bytes for layer in layers),
        parts=tuple(name for layer in layers for name in layer.graph_layers),
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        forward_spread=_mean([layer.forward_spread for layer in layers], [layer.forward_s for layer in layers]),
        backward_spread=_mean([layer.backward_spread for layer in layers], [layer.backward_s for layer in layers]),
        forward_work=total(layer.forward_work for layer in layers),
        backward_work=total(layer.backward_work for layer in layers),
        device_activation_bytes=sum(layer.kept_on_device_bytes for layer in layers),
    )


def _sums(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


def _mean(spreads: Sequence[float], seconds: Sequence[tuple[float, ...]]) -> float:
    """The mean of relative spreads, weighted with their seconds: the spread of the sum is no larger."""
    weights = [sum(row) for row in seconds]
    total = sum(weights)
    return sum(s * w for s, w in zip(spreads, weights, strict=True)) / total if total else max(spreads)


def _remapped(tensors: Sequence[TensorProfile], group_of: Sequence[int]) -> tuple[TensorProfile, ...]:
    kept = []
    for tensor in tensors:
        producer = group_of[tensor.producer]
        consumers = tuple(sorted({group_of[layer] for layer in tensor.consumers} - {producer}))
        if consumers:
            saved_by = tuple(sorted({group_of[layer] for layer in tensor.saved_by}))
            kept.append(replace(tensor, producer=producer, consumers=consumers, saved_by=saved_by))
    return tuple(kept)


def _remapped_ties(profile: ModelProfile, group_of: Sequence[int]) -> tuple[TiedParameter, ...]:
    found = [(tie, tuple(sorted({group_of[layer] for layer in tie.layers}))) for tie in profile.ties]
    return tuple(replace(tie, layers=layers) for tie, layers in found if len(layers) > 1)


def starts_of(merged: ModelProfile, profile: ModelProfile) -> tuple[int, ...]:
    """Where the layers of `merged` begin in `profile`, which it was made from, the number of layers at the end."""
    place = {layer.graph_layers[0]: i for i, layer in enumerate(profile.layers)}
    return (*(place[layer.graph_layers[0]] for layer in merged.layers), len(profile.layers))


@dataclass(frozen=True)
class PlacedPins:
    """Pins in terms of a profile's layers and a platform's sizes, by number. Raises InvalidValue for unknown names."""

    pins: Pins
    profile: ModelProfile
    spec: PlatformSpec

    def __post_init__(self) -> None:
        for group in self.pins.together:
            if not group:
                raise InvalidValue("together", group, "must name at least one layer in each group")
        _ = self.cuts, self.glued, self.sizes, self.open_sizes

    @cached_property
    def cuts(self) -> frozenset[int]:
        """The layers with which a stage must begin."""
        found = set()
        for name in self.pins.cuts:
            place = self._place("cuts", name)
            layer = self.profile.layers[place]
            if name not in (layer.name, layer.graph_layers[0]):
                raise InvalidValue("cuts", name, f"must not lie inside the merged layer {layer.name!r}")
            found.add(place)
        return frozenset(found)

    @cached_property
    def glued(self) -> frozenset[int]:
        """The layers with which no stage may begin."""
        found: set[int] = set()
        for group in self.pins.together:
            places = [self._place("together", name) for name in group]
            found.update(range(min(places) + 1, max(places) + 1))
        both = found & self.cuts
        if both:
            name = self.profile.layers[min(both)].name
            raise InvalidValue("cuts", name, "must not lie inside a group of layers that stay together")
        return frozenset(found)

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """For some layers the number of the size of the functions that hold them."""
        names = [size.name for size in self.spec.sizes]
        found = {}
        for layer, name in self.pins.sizes.items():
            if name not in names:
                raise InvalidValue(f"sizes.{layer}", name, f"must be one of {', '.join(names)}")
            found[self._place("sizes", layer)] = names.index(name)
        return found

    @cached_property
    def kept(self) -> frozenset[int]:
        """The layers with which a stage must still be able to begin when layers are merged.

        Between layers that are pinned to different sizes, that is the one where the fewest bytes cross.
        """
        crossing, pinned = crossing_bytes(self.profile), sorted(self.sizes.items())
        between = [
            min(set(range(first + 1, second + 1)) - self.glued, key=lambda layer: float(crossing[layer]), default=None)
            for (first, size), (second, other) in itertools.pairwise(pinned)
            if size != other and not any(first < cut <= second for cut in self.cuts)
        ]
        return self.cuts | {layer for layer in between if layer is not None}

    @cached_property
    def open_sizes(self) -> frozenset[int]:
        """The numbers of the sizes that may be chosen."""
        pins = self.pins
        found = frozenset(
            i
            for i, size in enumerate(self.spec.sizes)
            if (pins.memory_mb is None or size.memory_mb == pins.memory_mb)
            and (pins.max_memory_mb is None or size.memory_mb <= pins.max_memory_mb)
        )
        if not found:
            which = "memory_mb" if pins.memory_mb is not None else "max_memory_mb"
            offered = ", ".join(str(size.memory_mb) for size in self.spec.sizes)
            raise InvalidValue(
                which, getattr(pins, which), f"leaves no size of {self.spec.name}, which has {offered} MB"
            )
        return found

    def admits(self, first: int, stop: int) -> bool:
        """Return whether a stage may hold the layers `first` up to `stop`."""
        inside = any(first < cut < stop for cut in self.cuts)
        return not inside and first not in self.glued and stop not in self.glued

    def sizes_of(self, first: int, stop: int) -> frozenset[int]:
        """The numbers of the sizes that a stage of these layers may have."""
        wanted = {size for layer, size in self.sizes.items() if first <= layer < stop}
        return self.open_sizes & wanted if len(wanted) == 1 else frozenset() if wanted else self.open_sizes

    def _place(self, pin: str, name: str) -> int:
        for i, layer in enumerate(self.profile.layers):
            if name in layer.graph_layers or name == layer.name:
                return i
        raise InvalidValue(pin, name, f"must name a layer of {self.profile.model or 'the profile'}")


_NEVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """The stages that plans of at most `most` stages can have.

    `stops[first]` are the positions where a stage that begins with layer `first` may end; `fewest_before[first]` is the
    least number of stages in front of it. Layers of different `section` are never in one stage.
    """

    most: int
    stops: tuple[tuple[int, ...], ...]
    fewest_before: tuple[int, ...]
    section: tuple[int, ...]

    @classmethod
    def of(cls, layers: int, *, most: int | None = None, admits: Callable[[int, int], bool] | None = None) -> "Borders":
        """The borders of stages that `admits` admits (None: all), in plans of any number of stages unless `most`."""
        most = layers if most is None else min(most, layers)
        stops = [
            [stop for stop in range(first + 1, layers + 1) if admits is None or admits(first, stop)]
            for first in range(layers)
        ]
        before, behind = [0] + [_NEVER] * layers, [_NEVER] * layers + [0]
        for first in range(layers):
            for stop in stops[first]:
                before[stop] = min(before[stop], before[first] + 1)
        for first in reversed(range(layers)):
            behind[first] = min((behind[stop] + 1 for stop in stops[first]), default=_NEVER)
        possible = [
            tuple(stop for stop in stops[first] if before[first] + 1 + behind[stop] <= most) for first in range(layers)
        ]
        section, furthest, number = [], 1, 0
        for layer in range(layers):
            if layer and furthest <= layer:
                number += 1
            furthest = max(furthest, *possible[layer], 0)
            section.append(number)
        return cls(most=most, stops=tuple(possible), fewest_before=tuple(before), section=tuple(section))

    def most_behind(self, first: int) -> int:
        """How many stages there may be from layer `first` on."""
        return self.most - self.fewest_before[first]
