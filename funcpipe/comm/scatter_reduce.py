"""Summing the gradients of a stage's replicas through storage, as transfers with dependencies.

The flat gradient is cut into as many splits as there are replicas; replica i owns split i. Every replica puts the
splits that it does not own, gets its own split as the others wrote it, adds them in rank order (so that every run has
the same bits), puts the sum, and gets the other sums.

The algorithms are one set of transfers. *Three-phase* (LambdaML) finishes each phase before the next; *pipelined*
(FuncPipe, Liu et al. 2022, section 3.3) is the same without those dependencies, so that both links of a function are
busy at once. Worker i uploads the splits i+1, i+2, … and meanwhile downloads split i as written by the workers i-1,
i-2, …: in each step the one that was uploaded in the step before.
"""

import itertools
from dataclasses import dataclass
from enum import Enum

from funcpipe.core import Sync


class Move(Enum):
    """What a replica does with a split."""

    PUT_SPLIT = "put-split"
    GET_SPLIT = "get-split"
    MERGE = "merge"
    PUT_MERGED = "put-merged"
    GET_MERGED = "get-merged"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One move of one replica: the split concerned, who wrote it, and the earlier moves of the same replica it needs.

    `after` are positions in the replica's list of transfers. A get needs, besides, that its object has been put.
    """

    move: Move
    split: int
    peer: int | None
    after: tuple[int, ...]


def transfers(sync: Sync, *, replicas: int, replica: int) -> tuple[Transfer, ...]:
    """The moves of `replica`, in the order in which its lanes take them."""
    barrier = sync is Sync.THREE_PHASE
    distances = range(1, replicas)
    puts = tuple(Transfer(Move.PUT_SPLIT, (replica + d) % replicas, None, ()) for d in distances)
    phase_1 = tuple(range(len(puts)))
    gets = tuple(
        Transfer(Move.GET_SPLIT, replica, (replica - d) % replicas, phase_1 if barrier else ()) for d in distances
    )
    merge = len(puts) + len(gets)
    merged = merge + 1
    spread = tuple(
        Transfer(Move.GET_MERGED, (replica + d) % replicas, (replica + d) % replicas, (merged,) if barrier else ())
        for d in distances
    )
    return (
        *puts,
        *gets,
        Transfer(Move.MERGE, replica, None, tuple(range(len(puts), merge))),
        Transfer(Move.PUT_MERGED, replica, None, (merge,)),
        *spread,
    )


def split_ranges(length: int, splits: int) -> tuple[tuple[int, int], ...]:
    """Cut `length` elements into ranges [start, stop); the first `length mod splits` are one element longer."""
    short, longer = divmod(length, splits)
    starts = [i * short + min(i, longer) for i in range(splits + 1)]
    return tuple(itertools.pairwise(starts))
