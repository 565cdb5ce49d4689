"""The decisions of the user in terms of a profile's layers and a platform's sizes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from funcpipe.core import ModelProfile, Pins, PlatformSpec
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.problem.merge import crossing_bytes


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
        """Whether a stage may hold the layers `first` up to `stop`."""
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
