"""The tasks in which the replicas of a stage sum their gradients: put pieces, get pieces, add them up.

Which pieces a replica puts, gets and sums is the pattern's business (`funcpipe.comm.collectives`). A piece is named by
(round, split).
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.comm.channel import Channel, Received
from funcpipe.comm.gradient_chunks import GradientChunks, message_wire
from funcpipe.comm.sum_pattern import Pattern, Piece
from funcpipe.core import Wire
from funcpipe.errors import InvalidValue
from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Kind, Task, source_of


class Synchronisation:
    """Runs these tasks of one replica. `key_of` names the object that a put writes.

    `after_merge` is called with the fragment and the number of each round that the replica has summed, and with the
    sum, which it may change before others read it.
    """

    def __init__(
        self,
        channel: Channel,
        pattern: Pattern,
        replica: int,
        key_of: Callable[[Task], str],
        after_merge: Callable[[int, int, Tensor], None] = lambda fragment, round_number, values: None,
    ) -> None:
        self._channel = channel
        self._pattern = pattern
        self._replica = replica
        self._key_of = key_of
        self._after_merge = after_merge

    def run(self, task: Task, chunks: GradientChunks) -> TaskResult:
        """Run `task` with the replica's gradients."""
        assert task.part is not None, f"{task} has no number"
        match task.kind:
            case Kind.PUT_SPLIT:
                moved = self._pattern.raw_pieces(self._replica, task.part)
                return self._put(task, [chunks.contribution(piece) for piece in moved], chunks.wire)
            case Kind.PUT_MERGED:
                moved = self._pattern.merged_pieces(self._replica, task.part)
                return self._put(task, [chunks.merged(piece) for piece in moved], chunks.merged_wire)
            case Kind.GET_SPLIT:
                return self._get_raw(task, chunks, task.part)
            case Kind.GET_MERGED:
                return self._get_merged(task, chunks, task.part)
            case Kind.MERGE:
                return self._merge(task, chunks, task.part)
            case _:
                raise InvalidValue("task", str(task), "must be part of a synchronisation")

    def _put(self, task: Task, messages: Sequence[Mapping[str, Tensor]], wire: Wire) -> TaskResult:
        return TaskResult(self._channel.put_series(self._key_of(task), messages, wire=message_wire(wire)))

    def _get_raw(self, task: Task, chunks: GradientChunks, part: int) -> TaskResult:
        """Read this replica's pieces from an object that holds pieces for several readers."""
        assert task.peer is not None, f"{task} has no peer"
        sent, own = self._pattern.raw_pieces(task.peer, part), self._pattern.read_pieces(self._replica, task.peer, part)
        sizes, into = _sizes_of(own, chunks, chunks.wire), [chunks.room(piece) for piece in own]
        start, stop = _range_of(own, sent, chunks, chunks.wire)
        received = self._channel.get_series(self._key_of(source_of(task)), sizes, into, start=start, stop=stop)
        for piece, message in zip(own, received.messages, strict=True):
            chunks.receive(piece, task.peer, message)
        return result_of(received)

    def _merge(self, task: Task, chunks: GradientChunks, part: int) -> TaskResult:
        grouped = self._pattern.grouped_pieces(self._replica, part)
        for piece in grouped:
            chunks.merge_group(piece, self._replica, self._pattern.group_of(self._replica))
        return TaskResult() if grouped else self._merge_round(task, chunks, part)

    def _merge_round(self, task: Task, chunks: GradientChunks, round_number: int) -> TaskResult:
        """Sum a round. What an earlier attempt has put of it is used in place of what comes out now: a processor with
        other instructions rounds otherwise, and the other replicas have used what was put.
        """
        split = self._pattern.merges(self._replica)
        assert split is not None, f"{task} is no task of this replica"
        piece = round_number, split
        if not self._pattern.spreads:
            part = self._pattern.object_for(self._replica, round_number, self._replica)
            sent = self._pattern.raw_pieces(self._replica, part)
            self._read_again(task._replace(kind=Kind.PUT_SPLIT, part=part), sent, piece, chunks)
        chunks.merge(piece, self._replica)
        self._after_merge(task.fragment or 0, round_number, chunks[piece])
        if self._pattern.spreads:
            part = self._pattern.merged_part(round_number)
            sent = self._pattern.merged_pieces(self._replica, part)
            self._read_again(task._replace(kind=Kind.PUT_MERGED, part=part), sent, piece, chunks)
        return TaskResult()

    def _read_again(self, put: Task, sent: Sequence[Piece], piece: Piece, chunks: GradientChunks) -> None:
        """Read `piece` from the object of the pieces `sent` that `put` writes, if an earlier attempt has put it."""
        key = self._key_of(put)
        if self._channel.has_written(key):
            raw = put.kind is Kind.PUT_SPLIT
            start, stop = _range_of((piece,), sent, chunks, chunks.wire if raw else chunks.merged_wire)
            into = chunks.contribution(piece) if raw else chunks.merged_room(piece)
            self._channel.get(key, start=start, stop=stop, into=into)
            if not raw:
                chunks.unpack(piece)

    def _get_merged(self, task: Task, chunks: GradientChunks, part: int) -> TaskResult:
        assert task.peer is not None, f"{task} has no peer"
        sent = self._pattern.merged_pieces(task.peer, part)
        into = [chunks.merged_room(piece) for piece in sent]
        sizes = _sizes_of(sent, chunks, chunks.merged_wire)
        received = self._channel.get_series(self._key_of(source_of(task)), sizes, into)
        for piece in sent:
            chunks.unpack(piece)
        return result_of(received)


def _sizes_of(pieces: Sequence[Piece], chunks: GradientChunks, wire: Wire) -> list[int]:
    """Return the bytes of the messages of `pieces` in the format `wire`."""
    return [codec.message_bytes(chunks.form(piece, wire), message_wire(wire)) for piece in pieces]


def _range_of(
    pieces: Sequence[Piece], sent: Sequence[Piece], chunks: GradientChunks, wire: Wire
) -> tuple[int, int | None]:
    """Return the range of `pieces` in an object of the pieces `sent` in the format `wire`: its first byte, and its end
    unless that is the object's.
    """
    sizes, place = _sizes_of(sent, chunks, wire), sent.index(pieces[0])
    end = place + len(pieces)
    return sum(sizes[:place]), None if end == len(sent) else sum(sizes[:end])


def result_of(received: Received) -> TaskResult:
    """Return the result of the task that has read `received`."""
    return TaskResult(received.payload_bytes, received.waited_s)
