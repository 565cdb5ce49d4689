"""How replicas sum a gradient: its pieces, who adds them, and the objects in which they travel.

`collectives` says what each algorithm puts and gets, and in which order.
"""

import itertools
from dataclasses import dataclass
from enum import Enum

from funcpipe.core import Streams, Sync

Piece = tuple[int, int]
"""A round and a split."""


class Move(Enum):
    """The action of a replica on an object, or on the pieces of a round."""

    PUT_SPLIT = "put-split"
    GET_SPLIT = "get-split"
    MERGE = "merge"
    PUT_MERGED = "put-merged"
    GET_MERGED = "get-merged"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move of one replica, and the earlier moves of the same replica that it needs.

    `part` numbers the raw or merged objects of their writer, or the rounds of a merge, behind which comes that of a
    group; `peer` is the writer of the object that a get reads. `after` are positions in the replica's list of
    transfers. A get also needs its object.
    """

    move: Move
    part: int
    peer: int | None
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The way in which `replicas` sum a gradient: the pieces, their owners, and the objects in which they travel.

    In an all-reduce with a `server`, the server adds what the replicas put; its number is the one after theirs.
    """

    sync: Sync
    replicas: int
    streams: Streams
    server: bool = False

    @property
    def workers(self) -> int:
        """The number of participants: the replicas, and the server if there is one."""
        return self.replicas + self.server

    @property
    def splits(self) -> int:
        """The number of splits in a round."""
        return self.replicas if self.sync.shares_sums else 1

    def merges(self, replica: int) -> int | None:
        """Return the split that `replica` sums, if any."""
        if self.sync is Sync.ALL_REDUCE:
            return 0 if replica == (self.replicas if self.server else 0) else None
        return 0 if self.sync is Sync.EXCHANGE else replica

    def raw_pieces(self, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the pieces in the raw object `part` of `writer`, in order."""
        round_number, group = divmod(part, self.streams.groups)
        if self.splits == 1:
            return ((round_number, 0),) if self.workers > 1 and writer < self.replicas else ()
        first = 1 + group * self._readers
        distances = range(first, min(first + self._readers, self.replicas))
        return tuple((round_number, (writer + d) % self.replicas) for d in distances)

    def merged_pieces(self, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the pieces in the merged object `part` of `writer`, in order."""
        split = self.merges(writer)
        assert split is not None, f"replica {writer} sums nothing"
        return tuple((round_number, split) for round_number in self.rounds_of(part))

    def rounds_of(self, part: int) -> range:
        """Return the rounds whose sums the merged object `part` holds."""
        start, stop = split_ranges(self.streams.rounds, self.streams.merged)[part]
        return range(start, stop)

    def merged_part(self, round_number: int) -> int:
        """Return the merged object that holds the sums of a round."""
        return next(part for part in range(self.streams.merged) if round_number in self.rounds_of(part))

    def round_of(self, transfer: Transfer) -> int:
        """Return the round that a transfer moves or adds; the last one if there are several."""
        match transfer.move:
            case Move.PUT_SPLIT | Move.GET_SPLIT:
                return transfer.part // self.streams.groups
            case Move.MERGE:
                return transfer.part
            case Move.PUT_MERGED | Move.GET_MERGED:
                return self.rounds_of(transfer.part)[-1]

    def object_for(self, writer: int, round_number: int, reader: int) -> int:
        """Return the raw object of `writer` that holds the piece of `round_number` for `reader`."""
        if self.splits == 1:
            return round_number * self.streams.groups
        distance = (reader - writer) % self.replicas
        return round_number * self.streams.groups + (distance - 1) // self._readers

    def read_pieces(self, reader: int, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the pieces that `reader` gets from the raw object `part` of `writer`; they lie side by side."""
        split = self.merges(reader)
        return tuple(piece for piece in self.raw_pieces(writer, part) if piece[1] == split)

    def grouped_pieces(self, replica: int, part: int) -> tuple[Piece, ...]:
        """Return the pieces of which the merge `part` sums what the group of `replica` contributes; none if it sums a
        round over all replicas.
        """
        return ()

    def group_of(self, replica: int) -> range:
        """Return the replicas of the same group."""
        return range(self.replicas)

    def read_share(self, part: int) -> float:
        """Return the share of the gradient that a get reads from a raw object `part`."""
        return self.piece_share

    def raw_share(self, writer: int, part: int) -> float:
        """Return the share of the gradient in the raw object `part` of `writer`."""
        return len(self.raw_pieces(writer, part)) * self.piece_share

    def merged_share(self, part: int) -> float:
        """Return the share of the gradient in a merged object."""
        return len(self.rounds_of(part)) * self.piece_share

    @property
    def piece_share(self) -> float:
        """The share of the gradient in one piece."""
        return 1 / (self.streams.rounds * self.splits)

    @property
    def spreads(self) -> bool:
        """True if replicas put sums for others."""
        return self.sync is not Sync.EXCHANGE

    @property
    def turn(self) -> int:
        """The places in a circle by which replicas may change theirs, so that each does what another one did.

        So what replica r + turn does is what replica r does, with peers as many places further on. In a way that does
        not say so, no replica stands for another.
        """
        return 1 if self.sync in (Sync.THREE_PHASE, Sync.PIPELINED, Sync.STREAMED, Sync.EXCHANGE) else self.workers

    @property
    def _readers(self) -> int:
        return -(-(self.replicas - 1) // self.streams.groups)


def split_ranges(length: int, splits: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` elements into `splits` ranges [start, stop); the first `length mod splits` have one element more."""
    short, longer = divmod(length, splits)
    starts = [i * short + min(i, longer) for i in range(splits + 1)]
    return tuple(itertools.pairwise(starts))


ROUNDS_AHEAD = 4
"""How many rounds of pieces a replica asks for at once (`open_downloads`). Bodies pass in the order of asking, and all
others wait for the sums of what a late piece completes.
"""
