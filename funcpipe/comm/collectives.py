"""Sums the gradients of a stage's replicas through storage: the synchronisation, as transfers with dependencies.

The flat gradient is cut into *rounds*, and every round into *splits*, each owned by one replica; one split of one round
is a *piece*. Every replica puts the pieces of others as *raw* objects, gets its own pieces as the others wrote them,
adds them in rank order, puts the sums as *merged* objects, and gets those of the others. Rank order gives the same bits
in every run and with every algorithm but two, which add groups first: the hierarchical one, and trees. An object may
hold several pieces; a reader gets its own by their range of bytes.

All algorithms are this one family, with other numbers of objects and more or fewer dependencies:

- *three-phase* (LambdaML, SIGMOD 2021): one round, one raw object for each reader, each phase after the one before;
- *pipelined* (FuncPipe, Liu et al. 2022, section 3.3): the same objects, but in step k a replica puts the split of the
  replica k places after it while it gets its own split from the replica k - 1 places before it;
- *streamed*: several rounds, raw objects for groups of readers, merged objects for groups of rounds, no barriers;
- *exchange*: every replica puts everything, round by round, and every replica adds everything;
- *all-reduce* (LambdaML): every replica puts everything, the first one adds it and puts the sum;
- *hierarchical* (as NCCL and Horovod have it): in groups of about sqrt(n) replicas, see `TwoLevel`;
- *tree* (after Feng et al., IEEE CLOUD 2018): an all-reduce round by round, on the way to the first one, see `Tree`;
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
from dataclasses import replace
from functools import lru_cache

from funcpipe.comm.group_patterns import Tree, TwoLevel, tree_moves, two_level_moves
from funcpipe.comm.sum_pattern import ROUNDS_AHEAD, Move, Pattern, Transfer
from funcpipe.core import Plan, Streams, Sync, usual_streams
from funcpipe.core.choices import members_of_group


@lru_cache(maxsize=64)  # every task of a graph asks for its own
def pattern(sync: Sync, replicas: int, streams: Streams | None = None) -> Pattern:
    """Return the pattern of `sync`, cut as `streams` says; None means the usual cut."""
    several = sync is Sync.HIERARCHICAL and members_of_group(replicas) < replicas
    kind = TwoLevel if several else Tree if sync is Sync.TREE else Pattern
    return kind(sync, replicas, usual_streams(sync, replicas, streams))


def pattern_of(plan: Plan, stage: int) -> Pattern:
    """Return the pattern by which the replicas of a stage of `plan` sum their gradients."""
    return pattern(plan.ways[stage].sync, plan.replicas, plan.ways[stage].streams)


def transfers(pattern: Pattern, replica: int) -> tuple[Transfer, ...]:
    """The transfers of `replica` in the order of its lanes; the sums of a round come after the next rounds' pieces."""
    if isinstance(pattern, TwoLevel):
        return two_level_moves(pattern, replica)
    if isinstance(pattern, Tree):
        return tree_moves(pattern, replica)
    moves: list[Transfer] = []
    distances = range(1, pattern.workers)
    _add_raw(moves, pattern, replica, distances)
    if pattern.merges(replica) is not None:
        _add_merges(moves, pattern, replica)
    if pattern.spreads:
        _add_spread(moves, pattern, replica, distances)
    return _round_by_round(moves, pattern)


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


def _round_by_round(moves: Sequence[Transfer], pattern: Pattern) -> tuple[Transfer, ...]:
    """Return `moves` by rounds, but all raw puts first, and the gets of sums after those of pieces that have room."""
    if pattern.streams.rounds == 1:
        return tuple(moves)
    place = {Move.PUT_SPLIT: 0, Move.GET_SPLIT: 1, Move.MERGE: 2, Move.PUT_MERGED: 3, Move.GET_MERGED: 4}

    def key(position: int) -> tuple[int, int, int]:
        move = moves[position].move
        if move is Move.PUT_SPLIT:
            return -1, 0, position
        later = ROUNDS_AHEAD if move is Move.GET_MERGED else 0
        return pattern.round_of(moves[position]) + later, place[move], position

    order = sorted(range(len(moves)), key=key)
    new = {position: i for i, position in enumerate(order)}
    return tuple(replace(moves[i], after=tuple(new[need] for need in moves[i].after)) for i in order)


def _has_readers(pattern: Pattern, replica: int, part: int) -> bool:
    others = any(pattern.merges(other) is not None for other in range(pattern.workers) if other != replica)
    return others and bool(pattern.raw_pieces(replica, part))
