"""One replica's gradient vector, cut into the chunks that replicas sum.

For example, eight elements in two rounds of two splits: the last round comes first in the vector::

    element  0 1 | 2 3 | 4 5 | 6 7
    piece    1,0 | 1,1 | 0,0 | 0,1      (round, split)

Replica 1, which owns split 1, receives piece (0, 1) as replicas 0 and 2 wrote it, and adds: r0 + its own + r2.

Sums in 16 bits are taken in 32: every replica's contribution is rounded once, that of the one who adds like those that
it reads, and the sum is rounded again, whether it travels or not. So the sums have the same bits on all replicas, in
every way of synchronising but the hierarchical one. There the sum of a group takes the place of a contribution: those
of the group are added in rank order and the sum is rounded, then the sums of all groups are added in their order. With
bf16, which keeps 8 binary digits: 1 + 2⁻⁹ rounds to 1, so 1 + 2⁻⁹ from each of three replicas makes 3. The head keeps
its 32 bits; so do 64-bit numbers.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from funcpipe.comm.block_int8 import BLOCK
from funcpipe.comm.buffer_pool import block
from funcpipe.comm.piece_ranges import piece_ranges
from funcpipe.comm.sum_pattern import Pattern, Piece
from funcpipe.comm.wire_form import sent_as
from funcpipe.core import Wire

_ROUNDED_AT_ONCE = 64 * 1024  # elements, which stay in the processor's cache


class GradientChunks:
    """The pieces of `flat`, as views of it, and what other replicas wrote of them until that is added.

    `flat` has the shape (elements,). Its first `head` elements belong to the last round. What replicas contribute is
    rounded to `wire`, and so are the sums; what is put in place of sums travels as `merged_wire`, by default likewise.
    """

    def __init__(
        self,
        flat: Tensor,
        pattern: Pattern,
        head: int = 0,
        *,
        wire: Wire = Wire.FP32,
        merged_wire: Wire | None = None,
    ) -> None:
        self.wire = wire
        self.merged_wire = wire if merged_wire is None else merged_wire
        self._flat = flat
        self._head = head
        self._rounded = sent_as(flat.dtype, wire)
        self._ranges = piece_ranges(flat.numel(), pattern, head, cut_unit(wire))
        self._received: dict[Piece, dict[int, Mapping[str, Tensor]]] = defaultdict(dict)
        self._grouped: dict[Piece, dict[str, Tensor]] = {}

    def __getitem__(self, piece: Piece) -> Tensor:
        return self._flat[slice(*self.range_of(piece))]

    def range_of(self, piece: Piece) -> tuple[int, int]:
        """Return the elements [start, stop) of a piece."""
        round_number, split = piece
        return self._ranges[round_number][split]

    def form(self, piece: Piece, wire: Wire) -> dict[str, Tensor]:
        """Tensors of the dtypes and shapes of a piece's message in the format `wire`."""
        return self.message(piece, wire)

    def contribution(self, piece: Piece) -> dict[str, Tensor]:
        """The message of what this replica contributes to a piece, or its group if it has summed that; a message of it
        that is read into this counts.
        """
        return self._grouped.get(piece) or self.message(piece, self.wire)

    def merged(self, piece: Piece) -> dict[str, Tensor]:
        """Return the message of a piece's sum, or of what is put in its place."""
        return self.message(piece, self.merged_wire)

    def merged_room(self, piece: Piece) -> dict[str, Tensor]:
        """Return the memory that a piece's sum is read into; `unpack` comes after."""
        return self.message(piece, self.merged_wire)

    def unpack(self, piece: Piece) -> None:
        """Set a piece to what was read into `merged_room`: it is there already."""

    def message(self, piece: Piece, wire: Wire) -> dict[str, Tensor]:
        """Return the message that holds a piece in the format `wire`, as views; of the head, the bits travel."""
        round_number, split = piece
        start, stop = self._ranges[round_number][split]
        border = min(max(start, self._head), stop)
        if start == border or sent_as(self._flat.dtype, wire) is self._flat.dtype:
            return {"piece": self._flat[start:stop]}
        return {"head": self._flat[start:border].view(torch.int32), "piece": self._flat[border:stop]}

    def room(self, piece: Piece) -> dict[str, Tensor]:
        """Return the memory that another replica's piece is read into: as large as what travels, and no larger."""
        if self._rounded is self._flat.dtype:
            return {}  # decoding makes as much
        return {
            name: block(view.numel() * dtype.itemsize).view(dtype)
            for name, view in self.message(piece, self.wire).items()
            for dtype in [sent_as(view.dtype, self.wire)]
        }

    def receive(self, piece: Piece, replica: int, message: Mapping[str, Tensor]) -> None:
        """Keep the message of a piece as `replica` wrote it until `merge` adds it."""
        self._received[piece][replica] = message

    def merge_group(self, piece: Piece, own: int, group: range) -> None:
        """Sum a piece over the `group` of this replica, which is `own`, and contribute that to the sum of all groups.

        The gradient stays as it is: in a step that is repeated, the sum of all may be there already. So may sums of
        other groups, if this one is late.
        """
        grouped = {name: values.clone() for name, values in self.message(piece, self.wire).items()}
        self._sum(self._take(piece, group), own, grouped)
        self._grouped[piece] = grouped

    def merge(self, piece: Piece, own: int) -> None:
        """Sum a piece over all replicas, or all groups; this one is replica `own`.

        Values are added in rank order, so that the sum has the same bits wherever and however it is made.
        """
        totals = self.message(piece, self.wire)
        for name, values in self._grouped.get(piece, {}).items():
            totals[name].copy_(values)
        self._sum(self._received.pop(piece, {}), own, totals)

    def _take(self, piece: Piece, group: range) -> dict[int, Mapping[str, Tensor]]:
        """Return what has come of a piece from a `group`, and keep it no longer."""
        came = self._received[piece]
        return {rank: came.pop(rank) for rank in group if rank in came}

    def _sum(self, received: Mapping[int, Mapping[str, Tensor]], own: int, totals: Mapping[str, Tensor]) -> None:
        """Add what was `received` of a piece to `totals`, the message of what `own` contributes."""
        for name, total in totals.items():
            others = {rank: received[rank][name] for rank in sorted(received)}
            if name == "head":
                exact = self._flat.dtype
                _add(total.view(exact), {rank: values.view(exact) for rank, values in others.items()}, own)
            elif self._rounded is self._flat.dtype:
                _add(total, others, own)
            else:
                add_rounded(total, others, own, self._rounded)


def cut_unit(wire: Wire) -> int:
    """Return the unit, in elements, of pieces that are summed in the format `wire`."""
    return BLOCK if wire is Wire.INT8 else 1


def message_wire(wire: Wire) -> Wire:
    """The format in which messages of sums in the format `wire` are put: in 8 bits, chunks have rounded themselves."""
    return Wire.FP32 if wire is Wire.INT8 else wire


def _add(total: Tensor, others: Mapping[int, Tensor], own: int) -> None:
    """Add `others`, by rank in ascending order, to `total`, which comes from rank `own`; they may change."""
    earlier = [values for rank, values in others.items() if rank < own]
    if earlier:
        first = earlier[0]
        for values in earlier[1:]:
            first.add_(values)
        total.copy_(first.add_(total))
    for rank, values in others.items():
        if rank > own:
            total.add_(values)


def add_rounded(total: Tensor, others: Mapping[int, Tensor], own: int, rounded: torch.dtype) -> None:
    """The same, with `total` rounded to `rounded` like the `others` before they are added, and so is the sum."""
    size = min(total.numel(), _ROUNDED_AT_ONCE)
    wide, narrow = torch.empty(size, dtype=total.dtype), torch.empty(size, dtype=rounded)
    ranks = sorted([*others, own])
    for start in range(0, total.numel(), _ROUNDED_AT_ONCE):
        place = total[start : start + _ROUNDED_AT_ONCE]
        added, short = wide[: len(place)], narrow[: len(place)]
        short.copy_(place)
        for rank in ranks:
            values = short if rank == own else others[rank][start : start + _ROUNDED_AT_ONCE]
            if rank == ranks[0]:
                added.copy_(values)
            else:
                added.add_(values)
        place.copy_(short.copy_(added))
