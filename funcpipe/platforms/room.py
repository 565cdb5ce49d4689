"""The room that machines at hand have for functions: the sizes that fit on one of them, and how many fit at once."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from funcpipe.core import FunctionSize, Plan, PlatformSpec
from funcpipe.core.accelerator import Accelerator
from funcpipe.core.market import HOUR_S

_PARTS = (1, 2, 4)
"""A function has a GPU, or one of so many parts of it."""

_LEAST_HOST_MB = 4096  # of functions with a GPU: its libraries alone take a GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of a machine: its model, the memory that is free, what driver or cluster call it, dollars for an hour."""

    model: Accelerator
    free_mb: int
    label: str = ""
    usd_h: float = 0.0

    def parts_of(self, size: FunctionSize) -> int:
        """Return how many functions of that size it has room for; none if they want another GPU, or none."""
        wanted = size.accelerator
        return 0 if wanted is None or wanted.name != self.model.name else self.free_mb // wanted.memory_mb

    def without(self, size: FunctionSize) -> "Gpu":
        """Return what is left of it beside a function of that size."""
        return self if size.accelerator is None else replace(self, free_mb=self.free_mb - size.accelerator.memory_mb)

    def share_of(self, size: FunctionSize) -> float:
        """Return the share of this GPU that a function of that size has."""
        return 0.0 if size.accelerator is None else 1 / (self.model.memory_mb // size.accelerator.memory_mb)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one machine has for functions."""

    cpus: float
    memory_bytes: float
    gpus: tuple[Gpu, ...] = ()

    def count(self, size: FunctionSize) -> int:
        """Return how many functions of that size fit there at once."""
        found = math.floor(min(self.cpus / size.vcpu, self.memory_bytes / size.memory_bytes))
        return found if size.accelerator is None else min(found, sum(gpu.parts_of(size) for gpu in self.gpus))

    def without(self, size: FunctionSize) -> "Node":
        """Return the resources that are left beside a function of that size."""
        place = next((number for number, gpu in enumerate(self.gpus) if gpu.parts_of(size)), None)
        gpus = tuple(gpu.without(size) if number == place else gpu for number, gpu in enumerate(self.gpus))
        return Node(cpus=self.cpus - size.vcpu, memory_bytes=self.memory_bytes - size.memory_bytes, gpus=gpus)


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
    had, limit = size.accelerator, other.accelerator
    fits = had is None or (limit is not None and had.name == limit.name and had.memory_mb <= limit.memory_mb)
    return fits and size.vcpu <= other.vcpu and size.memory_mb <= other.memory_mb


def with_gpus(spec: PlatformSpec, nodes: Iterable[Node]) -> PlatformSpec:
    """Return `spec` with sizes that have a GPU as `nodes` have them, or a part of it, too.

    For each memory of the host they have the fewest processors. They cost what such a share of a machine with the GPU
    does, if that is more than they cost without. A part of a GPU computes at its share of the rates, as if the others
    computed all the time.
    """
    found = {gpu.model.name: gpu for node in nodes for gpu in node.gpus}
    hosts = {size.memory_mb: size for size in sorted(spec.sizes, key=lambda size: -size.vcpu)}
    made = [
        replace(
            host,
            name=f"{host.name}-{gpu.model.name}" + (f"-1of{parts}" if parts > 1 else ""),
            price_usd_s=max(host.price_usd_s, gpu.usd_h / HOUR_S / parts),
            accelerator=gpu.model.part(parts),
        )
        for gpu in found.values()
        for host in hosts.values()
        for parts in _PARTS
        if host.memory_mb >= _LEAST_HOST_MB
    ]
    return replace(spec, sizes=tuple(sorted((*spec.sizes, *made), key=lambda size: size.memory_mb)))


def of_nodes(spec: PlatformSpec, nodes: Sequence[Node], *, shared_cores: int | None) -> PlatformSpec:
    """Return `spec` with the sizes that fit on one of `nodes`, or the smallest if none does, as its check says.

    Those with a GPU are among them where a node has one.
    """
    offered = with_gpus(spec, nodes).sizes
    sizes = tuple(size for size in offered if any(node.count(size) for node in nodes)) or spec.sizes[:1]
    return replace(spec, sizes=sizes, shared_cores=shared_cores)


def largest_first(size: FunctionSize) -> tuple[float, float, int]:
    """Return the key by which functions are sorted before they are placed."""
    return -(0 if size.accelerator is None else size.accelerator.memory_mb), -size.vcpu, -size.memory_mb


def placed_at_once(sizes: Sequence[FunctionSize], nodes: Iterable[Node]) -> int:
    """Return how many functions of these sizes have a place before the first that has none, each on the first node."""
    left = list(nodes)
    for placed, size in enumerate(sizes):
        place = next((number for number, node in enumerate(left) if node.count(size)), None)
        if place is None:
            return placed
        left[place] = left[place].without(size)
    return len(sizes)
