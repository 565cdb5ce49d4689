"""Ray clusters: their URLs, and their specification: sizes that fit on their nodes, at prices of shares of machines."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import urlencode

from funcpipe.core import MB, FunctionSize, Plan, PlatformSpec
from funcpipe.core.market import HOUR_S, Machine, Market
from funcpipe.core.texts import url_parts
from funcpipe.errors import InvalidValue, PlatformRefused
from funcpipe.platforms.gpus import model_named
from funcpipe.platforms.room import Gpu, Node, largest_first, placed_at_once

SCHEME = "ray"
_RULE = (
    "must be ray://local, ray://auto, ray://HOST:PORT (Ray Client) or ray://HOST:PORT?via=gcs (from a node of the "
    "cluster), see docs/ray.md"
)


class Via(Enum):
    """The way in which this process connects to a cluster.

    LOCAL starts Ray on this machine; AUTO is the cluster that this machine is a node of. CLIENT is Ray Client's server,
    usually at port 10001; GCS is the cluster's control service, usually at port 6379, for processes on its nodes. HERE
    is the control service of a Ray that another process has started by LOCAL.
    """

    LOCAL = "local"
    AUTO = "auto"
    CLIENT = "client"
    GCS = "gcs"
    HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAddress:
    """A cluster. `endpoint` is HOST:PORT, empty for LOCAL and AUTO. `cpus` is how many LOCAL offers, None for all.

    Prices are those of `machine` in `market`, on demand or `spot`; None where they are not wanted.
    """

    via: Via
    endpoint: str = ""
    cpus: int | None = None
    market: str | None = None
    machine: str | None = None
    spot: bool = False

    @property
    def url(self) -> str:
        """The text that `parse_address` reads."""
        place = self.endpoint or self.via.value
        options: dict[str, Any] = {"via": self.via.value} if self.via in (Via.GCS, Via.HERE) else {}
        options |= {name: getattr(self, name) for name in ("cpus", "market", "machine") if getattr(self, name)}
        options |= {"spot": 1} if self.spot else {}
        return f"{SCHEME}://{place}" + (f"?{urlencode(options)}" if options else "")

    @property
    def ray_address(self) -> str | None:
        """The address for `ray.init`; None starts Ray."""
        match self.via:
            case Via.LOCAL:
                return None
            case Via.AUTO:
                return "auto"
            case Via.CLIENT:
                return f"ray://{self.endpoint}"
            case _:
                return self.endpoint

    @property
    def is_shared(self) -> bool:
        """True if the cluster outlives this client."""
        return self.via not in (Via.LOCAL, Via.HERE)

    def check_detachable(self) -> None:
        """Raise PlatformRefused for a run that is to be left to itself on a Ray that ends with its client."""
        if not self.is_shared:
            raise PlatformRefused(
                "Ray that is started for a run ends with its client, so no run can be left to itself there; start it "
                "with `ray start --head`, and use ray://auto"
            )

    def connected_at(self, gcs: str) -> "RayAddress":
        """Return the address by which other processes find the same cluster, whose control service is at `gcs`."""
        match self.via:
            case Via.LOCAL:
                return replace(self, via=Via.HERE, endpoint=gcs, cpus=None)
            case Via.AUTO:
                return replace(self, via=Via.GCS, endpoint=gcs)
            case _:
                return self


def parse_address(url: str) -> RayAddress:
    """Return the cluster that `url` names; a bare `ray` or `ray://` is Ray on this machine. Raises InvalidValue."""
    parts, options = url_parts("platform", url if "://" in url else f"{url}://")
    via = _via(url, parts.netloc or Via.LOCAL.value, options.pop("via", None))
    known = {"market", "machine", "spot"} | ({"cpus"} if via is Via.LOCAL else set())
    if parts.scheme != SCHEME or parts.path.strip("/") or parts.fragment or not options.keys() <= known:
        raise InvalidValue("platform", url, _RULE)
    if "machine" not in options and ("market" in options or "spot" in options):
        raise InvalidValue("platform", url, "must name the machine whose price it is, such as machine=c7i.4xlarge")
    cpus, spot = options.get("cpus"), options.get("spot", "0")
    if cpus is not None and (not cpus.isdecimal() or not int(cpus)):
        raise InvalidValue(
            "platform", url, "must give cpus as a whole number of at least 1, such as ray://local?cpus=4"
        )
    if spot not in ("0", "1"):
        raise InvalidValue("platform", url, "must say spot=1 for prices of spot machines, or leave it out")
    return RayAddress(
        via=via,
        endpoint=parts.netloc if via in (Via.CLIENT, Via.GCS, Via.HERE) else "",
        cpus=None if cpus is None else int(cpus),
        market=options.get("market", "aws" if "machine" in options else None),
        machine=options.get("machine"),
        spot=spot == "1",
    )


def _via(url: str, place: str, option: str | None) -> Via:
    if place in (Via.LOCAL.value, Via.AUTO.value) and option is None:
        return Via(place)
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or "@" in host or option not in (None, "client", "gcs", "here"):
        raise InvalidValue("platform", url, _RULE)
    return Via(option or "client")


_MOST_BYTES_S = 1e6


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
    plain = [size for size in spec.sizes if size.accelerator is None]
    larger = next((size for size in plain if size.memory_mb >= memory_mb), plain[-1])
    return replace(larger, name=name, memory_mb=memory_mb)


def check_plan(plan: Plan, spec: PlatformSpec, nodes: Sequence[Node], *, more: str) -> None:
    """Raise PlatformRefused unless all functions of `plan` can run at once on `nodes`; `more` says how to have more.

    Ray would queue what does not fit, and the others wait for it until their deadline. Placed greedily, the largest
    first: as Ray may place them too.
    """
    sizes = [size_for(spec, stage.size, stage.memory_mb) for stage in plan.stages for _ in range(plan.replicas)]
    sizes.sort(key=largest_first)
    placed = placed_at_once(sizes, nodes)
    if placed < len(sizes):
        size = sizes[placed]
        raise PlatformRefused(
            f"the plan needs {_sum(sizes)} at once, the cluster has {_offer(nodes)} on {len(nodes)} nodes: no place is "
            f"left for function {placed + 1} of {len(sizes)}, of {size.name} with {size.vcpu:g} CPUs; {more}, or plan "
            "for what it has, as `fit` does"
        )


def _sum(sizes: list[FunctionSize]) -> str:
    names = [size.name for size in sizes if size.accelerator is not None]
    gpus = f", with {' and '.join(f'{names.count(name)} of {name}' for name in dict.fromkeys(names))}," if names else ""
    return f"{sum(size.vcpu for size in sizes):g} CPUs and {sum(size.memory_mb for size in sizes)} MB{gpus}"


def _offer(nodes: Sequence[Node]) -> str:
    gpus = [gpu.model.name for node in nodes for gpu in node.gpus]
    found = f", GPUs {', '.join(gpus)}," if gpus else ""
    memory_mb = sum(node.memory_bytes for node in nodes) / MB
    return f"{sum(node.cpus for node in nodes):g} CPUs and {memory_mb:.0f} MB{found}"


_TYPE = "accelerator_type:"


def node_of(resources: Mapping[str, float]) -> Node:
    """Return what a node with these resources of Ray has for functions: its GPUs too, if their rates are known.

    Of several labels of its GPUs the longest says most: beside `A100` there may be `A100-80G`.
    """
    labels = [name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)]
    label = max(labels, key=len, default="")
    memory = re.search(r"-(\d+)G$", label, re.ASCII)
    model = model_named(label, None if memory is None else int(memory[1]) * 1024)
    count = 0 if model is None else int(resources.get("GPU", 0))
    gpus = () if model is None else (Gpu(model=model, free_mb=model.memory_mb, label=label),) * count
    return Node(cpus=resources.get("CPU", 0.0), memory_bytes=resources.get("memory", 0.0), gpus=gpus)


def gpu_request(size: FunctionSize, nodes: Sequence[Node]) -> tuple[float, str | None]:
    """Return how much of a GPU a function of that size asks Ray for, and of what type; 0 and None without one."""
    for gpu in (gpu for node in nodes for gpu in node.gpus):
        if size.accelerator is not None and gpu.model.name == size.accelerator.name:
            return gpu.share_of(size), gpu.label
    return 0.0, None
