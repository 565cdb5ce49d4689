"""The order in which samples that lie in shards are dealt out: fixed when a run begins, and kept on resuming."""

from dataclasses import dataclass

from funcpipe.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOrder:
    """An epoch's shards are dealt out to `lanes`; a lane shuffles its samples in windows of `window` shards.

    Sample p of a global batch comes from lane (p // `micro_batch`) mod `lanes`. A run begins with as many lanes as its
    plan has replicas, and with its plan's micro-batches, so that each replica reads a lane of its own. `digest` is of
    the shards' sizes: data that has changed is found out.
    """

    lanes: int
    micro_batch: int
    window: int
    digest: str

    def __post_init__(self) -> None:
        checks.at_least("lanes", self.lanes, 1)
        checks.at_least("micro_batch", self.micro_batch, 1)
        checks.at_least("window", self.window, 1)
