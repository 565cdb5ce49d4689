"""One replica's gradient vector, cut into the chunks that replicas sum.

For example, eight elements in two rounds of two splits: the last round comes first in the vector::

    element  0 1 | 2 3 | 4 5 | 6 7
    piece    1,0 | 1,1 | 0,0 | 0,1      (round, split)

Replica 1, which owns split 1, receives piece (0, 1) as replicas 0 and 2 wrote it, and adds: r0 + its own + r2.
"""

from collections import defaultdict

from torch import Tensor

from funcpipe.comm.collectives import Pattern, Piece, cut


class GradientChunks:
    """The pieces of `flat`, as views of it, and what other replicas wrote of them until that is added.

    `flat` has the shape (elements,). Its first `head` elements belong to the last round.
    """

    def __init__(self, flat: Tensor, pattern: Pattern, head: int = 0) -> None:
        self._flat = flat
        self._ranges = cut(flat.numel(), pattern, head)
        self._received: dict[Piece, dict[int, Tensor]] = defaultdict(dict)

    def __getitem__(self, piece: Piece) -> Tensor:
        round_number, split = piece
        start, stop = self._ranges[round_number][split]
        return self._flat[start:stop]

    def receive(self, piece: Piece, replica: int, values: Tensor) -> None:
        """Keep a piece as `replica` wrote it until `merge` adds it."""
        self._received[piece][replica] = values

    def merge(self, piece: Piece, own: int) -> None:
        """Sum a piece over all replicas; this one is replica `own`.

        Values are added in rank order, so that the sum has the same bits wherever and however it is made.
        """
        total, received = self[piece], self._received.pop(piece, {})
        earlier = [received[rank] for rank in sorted(received) if rank < own]
        if earlier:
            first = earlier[0]
            for values in earlier[1:]:
                first.add_(values)
            total.copy_(first.add_(total))
        for rank in sorted(received):
            if rank > own:
                total.add_(received[rank])
