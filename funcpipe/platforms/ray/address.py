"""URLs of Ray clusters: which cluster, how to connect to it, and what its machines cost."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from urllib.parse import urlencode

from funcpipe.core.texts import url_parts
from funcpipe.errors import InvalidValue, PlatformRefused

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
