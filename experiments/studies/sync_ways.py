"""The synchronisations that are measured: an algorithm, a number of replicas and bytes, and links."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from funcpipe.comm.collectives import Pattern, pattern
from funcpipe.core import Streams, Sync, Wire
from funcpipe.partitioner.cost.stores import requests_each
from funcpipe.partitioner.cost.sync_time import candidates, parameter_server_s, sync_time_s
from tests.partitioner.sync_links import Links

FASTEST = "fastest"
MOST_PUTS = 20
SERVER = "server"
SERVER_LINKS = 4
WAYS = (Sync.THREE_PHASE.value, Sync.PIPELINED.value, Sync.ALL_REDUCE.value, SERVER, FASTEST)


@dataclass(frozen=True)
class Way:
    """A synchronisation to measure: its algorithm, its size, its links, and the backward that it overlaps with."""

    sync: Sync
    streams: Streams | None
    replicas: int
    gradient_bytes: int
    links: Links
    store: str | None = None
    backward_s: float = 0.0
    server_bytes_s: float | None = None
    wire: Wire = Wire.FP32

    @property
    def sent_bytes(self) -> float:
        """What the gradient takes on its way."""
        return self.wire.ratio * self.gradient_bytes

    @property
    def pattern(self) -> Pattern:
        return replace(pattern(self.sync, self.replicas, self.streams), server=self.server_bytes_s is not None)

    @property
    def formula_s(self) -> float:
        if self.server_bytes_s is not None:
            links = (self.links.up, self.links.down, self.links.latency_s)
            return parameter_server_s(self.sent_bytes, self.replicas, *links, self.server_bytes_s)
        return float(
            sync_time_s(
                self.sync,
                gradient_bytes=self.sent_bytes,
                replicas=self.replicas,
                upload_bytes_s=self.links.up,
                download_bytes_s=self.links.down,
                latency_s=self.links.latency_s,
                streams=self.streams,
            )
        )

    def __str__(self) -> str:
        return self._algorithm if self.wire is Wire.FP32 else f"{self._algorithm} {self.wire.value}"

    @property
    def _algorithm(self) -> str:
        if self.server_bytes_s is not None:
            return f"server {self.server_bytes_s / 1e6:.0f} MB/s"
        if self.streams is None:
            return self.sync.value
        counts = (self.streams.rounds, self.streams.groups, self.streams.merged)
        return f"exchange {counts[0]}" if self.sync is Sync.EXCHANGE else f"streamed {counts}"


def ways(names: Sequence[str], replicas: int, gradient_bytes: int, links: Links, wire: Wire = Wire.FP32) -> list[Way]:
    """Those of the names; the fastest is the fastest stream or exchange with at most `MOST_PUTS` puts of a replica.

    A server's link is as fast as those of four replicas.
    """
    asked = (replicas, gradient_bytes, links)
    chosen = [Way(Sync(name), None, *asked, wire=wire) for name in names if name not in (FASTEST, SERVER)]
    if SERVER in names:
        chosen.append(Way(Sync.ALL_REDUCE, None, *asked, server_bytes_s=SERVER_LINKS * links.up, wire=wire))
    streams = [
        Way(sync, cut, *asked, wire=wire)
        for sync, cut in candidates(replicas)
        if requests_each(sync, replicas, cut)[0] <= MOST_PUTS
    ]
    return chosen + [min(streams, key=lambda way: way.formula_s)] * (FASTEST in names)
