"""The specification of a cluster: the sizes that fit on its nodes, at the price of a share of a machine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from funcpipe.core import MB, FunctionSize, Plan, PlatformSpec
from funcpipe.core.market import HOUR_S, Machine, Market
from funcpipe.errors import InvalidValue, PlatformRefused

_MOST_BYTES_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The resources of one node for tasks."""

    cpus: float
    memory_bytes: float

    def fits(self, size: FunctionSize) -> bool:
        """Return True if a function of that size can ever run there."""
        return size.vcpu <= self.cpus and size.memory_bytes <= self.memory_bytes

    def without(self, size: FunctionSize) -> "Node":
        """Return the resources that are left beside a function of that size."""
        return Node(cpus=self.cpus - size.vcpu, memory_bytes=self.memory_bytes - size.memory_bytes)


def of_nodes(spec: PlatformSpec, nodes: Iterable[Node], *, shared_cores: int | None) -> PlatformSpec:
    """`spec` with the sizes that fit on one of `nodes`, or the smallest if none does, as `check_plan` says better."""
    found = list(nodes)
    sizes = tuple(size for size in spec.sizes if any(node.fits(size) for node in found)) or spec.sizes[:1]
    return replace(spec, sizes=sizes, shared_cores=shared_cores)


def at_prices_of(spec: PlatformSpec, market: Market, machine: str, *, spot: bool) -> PlatformSpec:
    """Return `spec` with sizes that are a share of `machine`, at its price and of its network.

    The share of a size is that of the machine's vCPUs or of its memory, whichever is more. Raises InvalidValue.
    """
    found = market.machine(machine)
    usd_h = found.usd_h(spot=spot)
    if usd_h is None:
        raise InvalidValue("machine", machine, f"must have a spot price, and the market {market.name} has none for it")
    sizes = tuple(_share_of(found, size, usd_h) for size in spec.sizes if _is_part(size, found))
    if not sizes:
        raise InvalidValue("machine", machine, f"must be as large as the smallest size, {spec.sizes[0].name}")
    origin = f"of a share of {machine} in {market.region}, {market.as_of}"
    source = market.sources.get("spot_usd_h" if spot else "on_demand_usd_h", market.source)
    prices = {"price_usd_s": f"{'spot' if spot else 'on demand'}, {origin}: {source}"}
    links = dict.fromkeys(("upload_bytes_s", "download_bytes_s"), f"baseline, {origin}")
    return replace(spec, region=market.region, sizes=sizes, sources={**spec.sources, **prices, **links})


def _is_part(size: FunctionSize, machine: Machine) -> bool:
    return size.vcpu <= machine.vcpu and size.memory_mb <= machine.memory_mb


def _share_of(machine: Machine, size: FunctionSize, usd_h: float) -> FunctionSize:
    share = max(size.vcpu / machine.vcpu, size.memory_mb / machine.memory_mb)
    bytes_s = machine.network_mb_s * _MOST_BYTES_S * size.vcpu / machine.vcpu
    return replace(size, price_usd_s=share * usd_h / HOUR_S, upload_bytes_s=bytes_s, download_bytes_s=bytes_s)


def size_for(spec: PlatformSpec, name: str, memory_mb: int) -> FunctionSize:
    """Return the size called `name`, or `memory_mb` with the vCPUs of the smallest size that has them.

    So plans for other platforms can be run as they are.
    """
    for size in spec.sizes:
        if size.name == name:
            return size
    larger = next((size for size in spec.sizes if size.memory_mb >= memory_mb), spec.sizes[-1])
    return replace(larger, name=name, memory_mb=memory_mb)


def check_plan(plan: Plan, spec: PlatformSpec, nodes: Iterable[Node], *, more: str) -> None:
    """Raise PlatformRefused unless all functions of `plan` can run at once on `nodes`; `more` says how to have more.

    Ray would queue what does not fit, and the others wait for it until their deadline. Placed greedily, the largest
    first: as Ray may place them too.
    """
    sizes = [size_for(spec, stage.size, stage.memory_mb) for stage in plan.stages for _ in range(plan.replicas)]
    sizes.sort(key=lambda size: (size.vcpu, size.memory_mb), reverse=True)
    left = list(nodes)
    for placed, size in enumerate(sizes):
        place = next(_places(left, size), None)
        if place is None:
            raise PlatformRefused(
                f"the plan needs {_sum(sizes)} at once, the cluster has {_offer(left, sizes[:placed])} on "
                f"{len(left)} nodes: no place is left for function {placed + 1} of {len(sizes)}, of {size.name} with "
                f"{size.vcpu:g} CPUs; {more}, or plan for fewer replicas or stages"
            )
        left[place] = left[place].without(size)


def _places(nodes: list[Node], size: FunctionSize) -> Iterator[int]:
    return (number for number, node in enumerate(nodes) if node.fits(size))


def _sum(sizes: list[FunctionSize]) -> str:
    return f"{sum(size.vcpu for size in sizes):g} CPUs and {sum(size.memory_mb for size in sizes)} MB"


def _offer(left: list[Node], placed: list[FunctionSize]) -> str:
    cpus = sum(node.cpus for node in left) + sum(size.vcpu for size in placed)
    memory = sum(node.memory_bytes for node in left) / MB + sum(size.memory_mb for size in placed)
    return f"{cpus:g} CPUs and {memory:.0f} MB"
