"""The chunks of a gradient that is summed in 8 bits.

Each replica adds what it has kept (`error_feedback.py`) to its contribution, rounds it, and keeps what that takes
away. The adder adds the rounded contributions, in fp32 and in rank order, adds what it has kept of that sum,
rounds and keeps again. What the sum of a group loses is kept with the contribution of the replica that adds it. So all
replicas end with the same bits. Pieces are cut between blocks, so that blocks, and with them all bits, are the same in
every way of synchronising that adds in the same order. The head keeps its 32 bits.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from funcpipe.comm.block_int8 import BLOCK, blocks_in, quantise, restore
from funcpipe.comm.error_feedback import ErrorFeedback
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.comm.piece_ranges import piece_ranges
from funcpipe.comm.sum_pattern import Pattern, Piece
from funcpipe.core import Wire


class Int8Chunks(GradientChunks):
    """The pieces of `flat`, of 32-bit numbers; `feedback` is that of the replica, and changes."""

    def __init__(
        self, flat: Tensor, pattern: Pattern, head: int, *, merged_wire: Wire, feedback: ErrorFeedback
    ) -> None:
        super().__init__(flat, pattern, head, wire=Wire.INT8, merged_wire=merged_wire)
        self._feedback = feedback
        self._rounding = threading.Lock()
        self._sent: dict[Piece, dict[str, Tensor]] = {}
        self._sums: dict[Piece, dict[str, Tensor]] = {}

    def form(self, piece: Piece, wire: Wire) -> dict[str, Tensor]:
        """Tensors without values, of the dtypes and shapes of a piece's message."""
        if wire is not Wire.INT8:
            return super().form(piece, wire)
        start, border, stop = self._borders(piece)
        count = stop - border
        form = {"head": torch.empty(border - start, dtype=torch.int32, device="meta")} if border > start else {}
        whole = torch.empty(count, dtype=torch.int8, device="meta")
        return {**form, "whole": whole, "scales": torch.empty(blocks_in(count), device="meta")}

    def contribution(self, piece: Piece) -> dict[str, Tensor]:
        """Return this replica's contribution to a piece, rounded when it is first asked for."""
        with self._rounding:
            if piece not in self._sent:
                start, border, stop = self._borders(piece)
                kept = self._feedback.sent[border - self._head : stop - self._head]
                message = _rounded_message(self._flat[border:stop], kept)
                if border > start:
                    message["head"] = self._flat[start:border].view(torch.int32).clone()
                self._sent[piece] = message
            return self._sent[piece]

    def room(self, piece: Piece) -> dict[str, Tensor]:
        """Return no memory: decoding makes as much as the message needs."""
        return {}

    def merged(self, piece: Piece) -> dict[str, Tensor]:
        """Return the tensors that travel of a sum: views of the sum or of the updated parameters, unless in 8 bits."""
        return self._sums[piece] if self.merged_wire is Wire.INT8 else super().merged(piece)

    def merged_room(self, piece: Piece) -> dict[str, Tensor]:
        """Return the memory that another replica's sum is read into; `unpack` comes after.

        In a repeated step the sum may be there before this replica has put its contribution again. That is rounded
        now, before the sum takes its place, for what it leaves out is kept.
        """
        self.contribution(piece)
        if self.merged_wire is not Wire.INT8:
            return super().merged_room(piece)
        form = self.form(piece, Wire.INT8)
        self._sums[piece] = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in form.items()}
        return self._sums[piece]

    def unpack(self, piece: Piece) -> None:
        """Set a piece to the sum that was read into `merged_room`."""
        if self.merged_wire is Wire.INT8:
            start, border, stop = self._borders(piece)
            message = self._sums[piece]
            restore(message["whole"], message["scales"], self._flat[border:stop])
            if border > start:
                self._flat[start:border].copy_(message["head"].view(torch.float32))

    def merge_group(self, piece: Piece, own: int, group: range) -> None:
        """Sum a piece over the `group` of this replica, which is `own`, and contribute that from now on."""
        start, border, stop = self._borders(piece)
        total, head = torch.empty(stop - border), torch.empty(border - start)
        self._add({**self._take(piece, group), own: self.contribution(piece)}, total, head)
        lost = torch.zeros(stop - border)
        grouped = _rounded_message(total, lost)
        if border > start:
            grouped["head"] = head.view(torch.int32)
        with self._rounding:
            self._feedback.sent[border - self._head : stop - self._head] += lost
            self._sent[piece] = grouped

    def merge(self, piece: Piece, own: int) -> None:
        """Sum a piece over all replicas, or all groups; this one is replica `own`."""
        start, border, stop = self._borders(piece)
        total, head = self._flat[border:stop], self._flat[start:border]
        self._add({**self._received.pop(piece, {}), own: self.contribution(piece)}, total, head)
        summed = _rounded_message(total, self._feedback.of_sum(border, stop))
        restore(summed["whole"], summed["scales"], total)
        if border > start:
            summed["head"] = head.view(torch.int32)
        self._sums[piece] = summed

    def _add(self, messages: Mapping[int, Mapping[str, Tensor]], total: Tensor, head: Tensor) -> None:
        """Add the messages of a piece, in rank order, into `total`, and into `head` its part of that."""
        for number, rank in enumerate(sorted(messages)):
            message = messages[rank]
            restore(message["whole"], message["scales"], total, adds=number > 0)
            if len(head):
                exact = message["head"].view(torch.float32)
                head.copy_(head + exact if number else exact)

    def _borders(self, piece: Piece) -> tuple[int, int, int]:
        """Return where a piece begins, where its part of the head ends, and where it ends."""
        start, stop = self.range_of(piece)
        return start, min(max(start, self._head), stop), stop


def _rounded_message(values: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """The message of `values` with what was `kept` of them before; `kept` becomes what the message leaves out."""
    whole, scales = torch.empty(len(values), dtype=torch.int8), torch.empty(blocks_in(len(values)))
    quantise(values, whole, scales, kept=kept)
    return {"whole": whole, "scales": scales}


def gradient_chunks(
    flat: Tensor,
    pattern: Pattern,
    head: int = 0,
    *,
    wire: Wire = Wire.FP32,
    merged_wire: Wire | None = None,
    feedback: ErrorFeedback | None = None,
) -> GradientChunks:
    """The chunks of `flat` for sums in `wire`; with `feedback`, which 32-bit numbers in 8 bits need, in 8 bits."""
    if feedback is None:
        return GradientChunks(flat, pattern, head, wire=wire, merged_wire=merged_wire)
    merged_wire = wire if merged_wire is None else merged_wire
    return Int8Chunks(flat, pattern, head, merged_wire=merged_wire, feedback=feedback)


def new_feedback(
    flat: Tensor, pattern: Pattern, replica: int, head: int = 0, *, wire: Wire = Wire.INT8
) -> ErrorFeedback | None:
    """Return an empty feedback for `replica` to sum `flat` in `wire`; None unless 32-bit numbers go in 8 bits."""
    if wire is not Wire.INT8 or flat.dtype is not torch.float32:
        return None
    return ErrorFeedback(flat.numel() - head, summed_ranges(flat.numel(), pattern, head, replica))


def summed_ranges(elements: int, pattern: Pattern, head: int, replica: int) -> list[tuple[int, int]]:
    """Return the elements [start, stop) behind the head of each piece that `replica` sums in 8 bits."""
    split = pattern.merges(replica)
    if split is None:
        return []
    ranges = (splits[split] for splits in piece_ranges(elements, pattern, head, BLOCK))
    return [(min(max(start, head), stop), stop) for start, stop in ranges]
