"""Ways of summing that add the gradients of groups of replicas first: hierarchies and trees."""

from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.comm.sum_pattern import ROUNDS_AHEAD, Move, Pattern, Piece, Transfer
from funcpipe.core.choices import members_of_group


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


@dataclass(frozen=True, slots=True)
class Tree(Pattern):
    """The pattern of a tree: each replica adds what its children have put to its own, and puts that for its parent.

    With a fan-in of k, which is `streams.groups`, the children of replica r are k r + 1 to k r + k, as far as there are
    so many. The first replica has no parent: it puts the sums of all, which all others get. Children are added in rank
    order, and a sum that goes to a parent is rounded like a contribution.

    For example, six replicas with a fan-in of 2 in one round: 3 and 4 put theirs for 1, which puts r1 + r3 + r4; 5 puts
    its own for 2, which puts r2 + r5; and 0 puts r0 + (r1 + r3 + r4) + (r2 + r5).
    """

    def merges(self, replica: int) -> int | None:
        """Return the split that `replica` sums over all, if any."""
        return None if replica else 0

    def group_of(self, replica: int) -> range:
        """Return the children of a replica."""
        first = replica * self.streams.groups + 1
        return range(min(first, self.replicas), min(first + self.streams.groups, self.replicas))

    def raw_pieces(self, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the piece of a round, unless `writer` is the first replica."""
        return ((part, 0),) if writer else ()

    def round_of(self, transfer: Transfer) -> int:
        """Return the round that a transfer moves or adds."""
        return transfer.part % self.streams.rounds

    def object_for(self, writer: int, round_number: int, reader: int) -> int:
        """Return the raw object of `writer` that holds its piece of a round."""
        return round_number

    def read_pieces(self, reader: int, writer: int, part: int) -> tuple[Piece, ...]:
        """Return the piece of a round."""
        return self.raw_pieces(writer, part)

    def grouped_pieces(self, replica: int, part: int) -> tuple[Piece, ...]:
        """Return the piece of a round to which a replica adds those of its children, behind the rounds of the first."""
        return ((part - self.streams.rounds, 0),) if part >= self.streams.rounds else ()


def two_level_moves(pattern: TwoLevel, replica: int) -> tuple[Transfer, ...]:
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


def tree_moves(pattern: Tree, replica: int) -> tuple[Transfer, ...]:
    """In rounds: get the children's sums → add them → put that for the parent; or, of all, put and get the sum."""
    moves: list[Transfer] = []
    rounds = pattern.streams.rounds
    for q in range(rounds + ROUNDS_AHEAD):
        if q < rounds:
            gets = [Transfer(Move.GET_SPLIT, q, child, ()) for child in pattern.group_of(replica)]
            moves += gets
            needs = tuple(range(len(moves) - len(gets), len(moves)))
            if gets or not replica:
                moves.append(Transfer(Move.MERGE, q + rounds if replica else q, None, needs))
                needs = (len(moves) - 1,)
            moves.append(Transfer(Move.PUT_SPLIT if replica else Move.PUT_MERGED, q, None, needs))
        if replica and q >= ROUNDS_AHEAD:
            moves.append(Transfer(Move.GET_MERGED, q - ROUNDS_AHEAD, 0, ()))
    return tuple(moves)
