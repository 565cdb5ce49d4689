"""A way of synchronising: which, and into how many rounds, groups and objects it is divided."""

from dataclasses import dataclass

from funcpipe.core import checks
from funcpipe.core.choices import Sync


@dataclass(frozen=True, slots=True)
class Streams:
    """The division of a streamed synchronisation: into `rounds`, each with raw objects for `groups` of readers.

    Each replica sends the sums of all rounds in `merged` objects. An exchange only has rounds.
    """

    rounds: int
    groups: int
    merged: int

    def __post_init__(self) -> None:
        for field in ("rounds", "groups", "merged"):
            checks.at_least(field, getattr(self, field), 1)


def usual_streams(sync: Sync, replicas: int, streams: Streams | None = None) -> Streams:
    """Return how `sync` divides the gradient among `replicas`: by `streams` where it applies, otherwise as usual."""
    one_each = max(replicas - 1, 1)
    match sync:
        case Sync.THREE_PHASE | Sync.PIPELINED:
            return Streams(rounds=1, groups=one_each, merged=1)
        case Sync.ALL_REDUCE:
            return Streams(rounds=1, groups=1, merged=1)
        case Sync.EXCHANGE:
            return Streams(rounds=8 if streams is None else streams.rounds, groups=1, merged=1)
        case Sync.STREAMED:
            chosen = Streams(rounds=2, groups=7, merged=2) if streams is None else streams
            return Streams(chosen.rounds, min(chosen.groups, one_each), min(chosen.merged, chosen.rounds))


@dataclass(frozen=True, slots=True)
class SyncWay:
    """A way of synchronising; `streams` as in `usual_streams`.

    >>> str(SyncWay(Sync.STREAMED, Streams(rounds=12, groups=1, merged=4)))
    'streamed 12/1/4'
    """

    sync: Sync
    streams: Streams | None = None

    def __str__(self) -> str:
        """Return the way and its counts: rounds, groups and merged objects, or only the rounds of an exchange."""
        if self.streams is None:
            return self.sync.value
        counts = (self.streams.rounds, self.streams.groups, self.streams.merged)
        return f"{self.sync.value} {counts[0] if self.sync is Sync.EXCHANGE else '/'.join(map(str, counts))}"
