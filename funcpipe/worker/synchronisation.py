"""What each task of a synchronisation does: pieces of the gradient to and from the storage, and their sums."""

from collections.abc import Callable, Sequence

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.comm.channel import Channel, Received
from funcpipe.comm.collectives import Pattern, Piece
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.errors import InvalidValue
from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Kind, Task, source_of


class Synchronisation:
    """Does those tasks of one replica. `key_of` names the object that a put writes.

    `merged` is called with the number of each round that the replica has summed, and may change the sum before others
    read it.
    """

    def __init__(
        self,
        channel: Channel,
        pattern: Pattern,
        replica: int,
        key_of: Callable[[Task], str],
        merged: Callable[[int, Tensor], None] = lambda round_number, values: None,
    ) -> None:
        self._channel = channel
        self._pattern = pattern
        self._replica = replica
        self._key_of = key_of
        self._merged = merged

    def run(self, task: Task, pieces: GradientChunks) -> TaskResult:
        """Do `task`; numbers travel as they are, whatever the wire format of activations."""
        assert task.part is not None, f"{task} has no number"
        match task.kind:
            case Kind.PUT_SPLIT:
                return self._put(task, pieces, self._pattern.raw_pieces(self._replica, task.part))
            case Kind.PUT_MERGED:
                return self._put(task, pieces, self._pattern.merged_pieces(self._replica, task.part))
            case Kind.GET_SPLIT:
                return self._get_raw(task, pieces, task.part)
            case Kind.GET_MERGED:
                return self._get_merged(task, pieces, task.part)
            case Kind.MERGE:
                split = self._pattern.merges(self._replica)
                assert split is not None, f"{task} is no task of this replica"
                pieces.merge((task.part, split), self._replica)
                self._merged(task.part, pieces[task.part, split])
                return TaskResult()
            case _:
                raise InvalidValue("task", str(task), "must be part of a synchronisation")

    def _put(self, task: Task, pieces: GradientChunks, moved: Sequence[Piece]) -> TaskResult:
        messages = [{"piece": pieces[piece]} for piece in moved]
        return TaskResult(self._channel.put_series(self._key_of(task), messages))

    def _get_raw(self, task: Task, pieces: GradientChunks, part: int) -> TaskResult:
        """Read one's own piece of an object that holds those of several readers."""
        assert task.peer is not None, f"{task} reads from nobody"
        sent = self._pattern.raw_pieces(task.peer, part)
        own = next(piece for piece in sent if piece[1] == self._pattern.merges(self._replica))
        sizes = [_message_bytes(pieces[piece]) for piece in sent]
        start = sum(sizes[: sent.index(own)])
        stop = start + sizes[sent.index(own)]
        received = self._channel.get(
            self._key_of(source_of(task)), start=start, stop=None if stop == sum(sizes) else stop
        )
        pieces.receive(own, task.peer, received.tensors["piece"])
        return _outcome(received)

    def _get_merged(self, task: Task, pieces: GradientChunks, part: int) -> TaskResult:
        assert task.peer is not None, f"{task} reads from nobody"
        sent = self._pattern.merged_pieces(task.peer, part)
        into = [{"piece": pieces[piece]} for piece in sent]
        return _outcome(self._channel.get_series(self._key_of(source_of(task)), into))


def _message_bytes(values: Tensor) -> int:
    return codec.message_bytes({"piece": values})


def _outcome(received: Received) -> TaskResult:
    return TaskResult(received.payload_bytes, received.waited_s)
