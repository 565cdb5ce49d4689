"""The room that machines at hand have for functions: the sizes that fit on one of them, and how many fit at once."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from funcpipe.core import FunctionSize, Plan, PlatformSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one machine has for functions."""

    cpus: float
    memory_bytes: float

    def count(self, size: FunctionSize) -> int:
        """Return how many functions of that size fit there at once."""
        return math.floor(min(self.cpus / size.vcpu, self.memory_bytes / size.memory_bytes))

    def without(self, size: FunctionSize) -> "Node":
        """Return the resources that are left beside a function of that size."""
        return Node(cpus=self.cpus - size.vcpu, memory_bytes=self.memory_bytes - size.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The specification of a platform, and the nodes that its functions share; None where a cloud has more of them."""

    spec: PlatformSpec
    nodes: tuple[Node, ...] | None = None

    def has_room(self, plan: Plan) -> bool:
        """Return True if all functions of a plan can run at once, and `spec` has their sizes."""
        if self.nodes is None:
            return True
        known = {size.name: size for size in self.spec.sizes}
        names = [stage.size for stage in plan.stages for _ in range(plan.replicas)]
        sizes = sorted((known[name] for name in names if name in known), key=largest_first)
        return len(sizes) == len(names) == placed_at_once(sizes, self.nodes)

    def where_all_have_room(self) -> Iterator[PlatformSpec]:
        """Yield parts of `spec` each of whose plans has room on the nodes; none is a part of another.

        A part has the sizes up to one of them, and at most as many functions as there is room for of that one.
        """
        parts = list[PlatformSpec]()
        for largest in reversed(self.spec.sizes):
            most = min(self.spec.max_functions, sum(node.count(largest) for node in self.nodes or ()))
            sizes = tuple(size for size in self.spec.sizes if _is_within(size, largest))
            if most and not any({*sizes} <= {*part.sizes} and most <= part.max_functions for part in parts):
                parts.append(replace(self.spec, sizes=sizes, max_functions=most))
                yield parts[-1]


def _is_within(size: FunctionSize, other: FunctionSize) -> bool:
    return size.vcpu <= other.vcpu and size.memory_mb <= other.memory_mb


def of_nodes(spec: PlatformSpec, nodes: Sequence[Node], *, shared_cores: int | None) -> PlatformSpec:
    """Return `spec` with the sizes that fit on one of `nodes`, or the smallest if none does, as its check says."""
    sizes = tuple(size for size in spec.sizes if any(node.count(size) for node in nodes)) or spec.sizes[:1]
    return replace(spec, sizes=sizes, shared_cores=shared_cores)


def largest_first(size: FunctionSize) -> tuple[float, int]:
    """Return the key by which functions are sorted before they are placed."""
    return -size.vcpu, -size.memory_mb


def placed_at_once(sizes: Sequence[FunctionSize], nodes: Iterable[Node]) -> int:
    """Return how many functions of these sizes have a place before the first that has none, each on the first node."""
    left = list(nodes)
    for placed, size in enumerate(sizes):
        place = next((number for number, node in enumerate(left) if node.count(size)), None)
        if place is None:
            return placed
        left[place] = left[place].without(size)
    return len(sizes)
