"""Sums the gradients of a stage's replicas through storage: the synchronisation, as transfers with dependencies.

The flat gradient is cut into *rounds*, and every round into *splits*, each owned by one replica; one split of one round
is a *piece*. Every replica puts the pieces of others as *raw* objects, gets its own pieces as the others wrote them,
adds them in rank order, puts the sums as *merged* objects, and gets those of the others. Rank order gives the same bits
in every run and with every algorithm but the hierarchical one, which adds groups first. An object may hold several
pieces; a reader gets its own by their range of bytes.

All algorithms are this one family, with other numbers of objects and more or fewer dependencies:

- *three-phase* (LambdaML, SIGMOD 2021): one round, one raw object for each reader, each phase after the one before;
- *pipelined* (FuncPipe, Liu et al. 2022, section 3.3): the same objects, but in step k a replica puts the split of the
  replica k places after it while it gets its own split from the replica k - 1 places before it;
- *streamed*: several rounds, raw objects for groups of readers, merged objects for groups of rounds, no barriers;
- *exchange*: every replica puts everything, round by round, and every replica adds everything;
- *all-reduce* (LambdaML): every replica puts everything, the first one adds it and puts the sum;
- *hierarchical* (as NCCL and Horovod have it): in groups of about sqrt(n) replicas, see `TwoLevel`;
- *parameter server* (HybridPS in LambdaML): the same, but a process beside the replicas adds it.

For example, replica 0 of three, streamed in one round with one group of readers: split 0 is its own, so its raw object
0 holds splits 1 and 2. Its transfers, each with the positions of those it comes after::

    0 put-split k0           ()        splits 1 and 2, as its own gradient has them
    1 get-split k0 of 2      ()        split 0 as replica 2 wrote it
    2 get-split k0 of 1      ()        split 0 as replica 1 wrote it
    3 merge k0               (1, 2)    split 0 = its own + replica 1's + replica 2's
    4 put-merged k0          (3,)      the sum of split 0
    5 get-merged k0 of 1     ()        the sum of split 1
    6 get-merged k0 of 2     ()        the sum of split 2
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from funcpipe.core import Plan, Streams, Sync, usual_streams
from funcpipe.core.choices import members_of_group

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
        return 1 if self.sync in (Sync.EXCHANGE, Sync.ALL_REDUCE) else self.replicas

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


@dataclass(frozen=True, slots=True)
class TwoLevel(Pattern):
    """The hierarchical pattern: sums within groups of consecutive ranks, then of the groups' sums.

    The replicas at the same place of all groups form a *column*, and sum the splits of its replicas. Each replica gets
    these from the other members of its group and adds them in rank order; rounded like a contribution, the sum is that
    of the group. Of these it gets its own split from its column, and adds it in the order of groups. Sums go back in
    the same two steps. The n - 1 pieces that a replica gets in each direction are those of a flat algorithm, in 2
    sqrt(n) objects.

    For example, six replicas in the groups 0 1 2 and 3 4 5; the columns are 0 3, 1 4 and 2 5. Replica 4, with one group
    of readers, puts splits 2 5 0 3; gets splits 1 4 of 3 and 5, and merges them (part 1); puts split 1 for replica 1,
    gets split 4 of it, and merges that (part 0); puts the sum of split 4, gets that of split 1; puts both for its
    group, and gets the sums 0 3 and 2 5. Split 4 is (r0 + r1 + r2) + (r3 + r4 + r5).
    """

    @property
    def members(self) -> int:
        """The number of replicas in a group."""
        return members_of_group(self.replicas)

    def group_of(self, replica: int) -> range:
        """Return the replicas of the same group."""
        first = replica - replica % self.members
        return range(first, first + self.members)

    def column(self, replica: int) -> range:
        """Return the replicas at the same place of all groups."""
        return range(replica % self.members, self.replicas, self.members)

    def raw_pieces(self, writer: int, part: int) -> tuple[Piece, ...]:
        """Return those for readers in the group, column by column, or in the last part those for other groups."""
        if part == self.streams.groups:
            return tuple((0, split) for split in self.column(writer) if split != writer)
        first = 1 + part * self._readers
        distances = range(first, min(first + self._readers, self.members))
        return tuple((0, split) for d in distances for split in self.column((writer + d) % self.members))

    def merged_pieces(self, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the piece for other groups, or in the last part the pieces for the group."""
        return tuple((0, split) for split in self.column(writer)) if part else ((0, writer),)

    def round_of(self, transfer: Transfer) -> int:
        """Return the only round."""
        return 0

    def object_for(self, writer: int, round_number: int, reader: int) -> int:
        """Return the raw object of `writer` for a `reader` in its group."""
        return ((reader - writer) % self.members - 1) // self._readers

    def read_pieces(self, reader: int, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the pieces of the reader's column from its group, or its own piece from another one."""
        return tuple((0, split) for split in self.column(reader)) if part < self.streams.groups else ((0, reader),)

    def grouped_pieces(self, replica: int, part: int) -> tuple[Piece, ...]:
        """Return the pieces of the replica's column for the merge behind that of the only round."""
        return tuple((0, split) for split in self.column(replica)) if part else ()

    def read_share(self, part: int) -> float:
        """Return the share of the gradient that a get reads from a raw object `part`."""
        return 1 / self.members if part < self.streams.groups else self.piece_share

    def merged_share(self, part: int) -> float:
        """Return the share of the gradient in a merged object."""
        return 1 / self.members if part else self.piece_share

    @property
    def _readers(self) -> int:
        return -(-(self.members - 1) // self.streams.groups)


@lru_cache(maxsize=64)  # every task of a graph asks for its own
def pattern(sync: Sync, replicas: int, streams: Streams | None = None) -> Pattern:
    """Return the pattern of `sync`, cut as `streams` says; None means the usual cut."""
    several = sync is Sync.HIERARCHICAL and members_of_group(replicas) < replicas
    return (TwoLevel if several else Pattern)(sync, replicas, usual_streams(sync, replicas, streams))


def pattern_of(plan: Plan, stage: int) -> Pattern:
    """Return the pattern by which the replicas of a stage of `plan` sum their gradients."""
    return pattern(plan.ways[stage].sync, plan.replicas, plan.ways[stage].streams)


def transfers(pattern: Pattern, replica: int) -> tuple[Transfer, ...]:
    """The transfers of `replica` in the order of its lanes; the sums of a round come after the next rounds' pieces."""
    if isinstance(pattern, TwoLevel):
        return _two_levels(pattern, replica)
    moves: list[Transfer] = []
    distances = range(1, pattern.workers)
    _add_raw(moves, pattern, replica, distances)
    if pattern.merges(replica) is not None:
        _add_merges(moves, pattern, replica)
    if pattern.spreads:
        _add_spread(moves, pattern, replica, distances)
    return _round_by_round(moves, pattern)


def _two_levels(pattern: TwoLevel, replica: int) -> tuple[Transfer, ...]:
    """Reduce within the group → reduce over groups → spread over groups → spread within the group."""
    first, last = pattern.group_of(replica)[0], pattern.streams.groups
    near = [first + (replica + d) % pattern.members for d in range(1, pattern.members)]
    far = [(replica + d) % pattern.replicas for d in range(pattern.members, pattern.replicas, pattern.members)]
    moves = [Transfer(Move.PUT_SPLIT, part, None, ()) for part in range(last) if pattern.raw_pieces(replica, part)]

    def add(move: Move, part: int, *after: int) -> int:
        moves.append(Transfer(move, part, None, after))
        return len(moves) - 1

    def gets(move: Move, peers: Sequence[int], part: int | None) -> range:
        parts = [pattern.object_for(peer, 0, replica) if part is None else part for peer in peers]
        moves.extend(Transfer(move, own, peer, ()) for peer, own in zip(peers, parts, strict=True))
        return range(len(moves) - len(peers), len(moves))

    grouped = add(Move.MERGE, 1, *gets(Move.GET_SPLIT, near[::-1], None))
    add(Move.PUT_SPLIT, last, grouped)
    summed = add(Move.MERGE, 0, grouped, *gets(Move.GET_SPLIT, far[::-1], last))
    add(Move.PUT_MERGED, 0, summed)
    add(Move.PUT_MERGED, 1, summed, *gets(Move.GET_MERGED, far, 0))
    gets(Move.GET_MERGED, near, 1)
    return tuple(moves)


def _add_raw(moves: list[Transfer], pattern: Pattern, replica: int, distances: Sequence[int]) -> None:
    objects = range(pattern.streams.rounds * pattern.streams.groups)
    owned = pattern.merges(replica)
    puts = [part for part in objects if _has_readers(pattern, replica, part)]
    gets = [
        ((replica - d) % pattern.workers, pattern.object_for((replica - d) % pattern.workers, q, replica))
        for q in range(pattern.streams.rounds)
        for d in distances
        if owned is not None
    ]
    if pattern.sync is Sync.PIPELINED:
        _add_steps(moves, puts, gets)
        return
    moves += [Transfer(Move.PUT_SPLIT, part, None, ()) for part in puts]
    barrier = tuple(range(len(moves))) if pattern.sync is Sync.THREE_PHASE else ()
    moves += [Transfer(Move.GET_SPLIT, part, peer, barrier) for peer, part in gets]


def _add_steps(moves: list[Transfer], puts: Sequence[int], gets: Sequence[tuple[int, int]]) -> None:
    """FuncPipe's steps: in each, one put, and one get of what the peer put in the step before."""
    before: tuple[int, ...] = ()
    for step in range(len(puts) + 1):
        first = len(moves)
        if step < len(puts):
            moves.append(Transfer(Move.PUT_SPLIT, puts[step], None, before))
        if step > 0:
            peer, part = gets[step - 1]
            moves.append(Transfer(Move.GET_SPLIT, part, peer, before))
        before = tuple(range(first, len(moves)))


def _add_merges(moves: list[Transfer], pattern: Pattern, replica: int) -> None:
    """Add a round once all of it has arrived and once the replica's own values, which the sum replaces, are put."""
    gets = [i for i, transfer in enumerate(moves) if transfer.move is Move.GET_SPLIT]
    puts = [i for i, transfer in enumerate(moves) if transfer.move is Move.PUT_SPLIT]
    each = pattern.workers - 1
    for q in range(pattern.streams.rounds):
        own = tuple(puts[q : q + 1]) if pattern.sync is Sync.EXCHANGE else ()
        moves.append(Transfer(Move.MERGE, q, None, own + tuple(gets[q * each : (q + 1) * each])))


def _add_spread(moves: list[Transfer], pattern: Pattern, replica: int, distances: Sequence[int]) -> None:
    merges = [i for i, transfer in enumerate(moves) if transfer.move is Move.MERGE]
    parts = range(pattern.streams.merged)
    puts: list[int] = []
    for part in parts if merges else ():
        puts.append(len(moves))
        moves.append(Transfer(Move.PUT_MERGED, part, None, tuple(merges[q] for q in pattern.rounds_of(part))))
    barrier = tuple(puts) if pattern.sync is Sync.THREE_PHASE else ()
    writers = [(replica + d) % pattern.workers for d in distances]
    for part, writer in itertools.product(parts, writers):
        if pattern.merges(writer) is not None:
            moves.append(Transfer(Move.GET_MERGED, part, writer, barrier))


_ROUNDS_AHEAD = 4
"""How many rounds of pieces a replica asks for at once (`open_downloads`). Bodies pass in the order of asking, and all
others wait for the sums of what a late piece completes.
"""


def _round_by_round(moves: Sequence[Transfer], pattern: Pattern) -> tuple[Transfer, ...]:
    """Return `moves` by rounds, but all raw puts first, and the gets of sums after those of pieces that have room."""
    if pattern.streams.rounds == 1:
        return tuple(moves)
    place = {Move.PUT_SPLIT: 0, Move.GET_SPLIT: 1, Move.MERGE: 2, Move.PUT_MERGED: 3, Move.GET_MERGED: 4}

    def key(position: int) -> tuple[int, int, int]:
        move = moves[position].move
        if move is Move.PUT_SPLIT:
            return -1, 0, position
        later = _ROUNDS_AHEAD if move is Move.GET_MERGED else 0
        return pattern.round_of(moves[position]) + later, place[move], position

    order = sorted(range(len(moves)), key=key)
    new = {position: i for i, position in enumerate(order)}
    return tuple(replace(moves[i], after=tuple(new[need] for need in moves[i].after)) for i in order)


def _has_readers(pattern: Pattern, replica: int, part: int) -> bool:
    others = any(pattern.merges(other) is not None for other in range(pattern.workers) if other != replica)
    return others and bool(pattern.raw_pieces(replica, part))


def split_ranges(length: int, splits: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` elements into `splits` ranges [start, stop); the first `length mod splits` have one element more."""
    short, longer = divmod(length, splits)
    starts = [i * short + min(i, longer) for i in range(splits + 1)]
    return tuple(itertools.pairwise(starts))
