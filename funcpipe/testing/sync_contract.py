"""What every way of synchronising must do, as a suite for pytest: it plays all replicas with numbers.

A test module gives the fixture `way`, from a number of replicas to their `Pattern`, and inherits the suite.
"""

from collections.abc import Callable, Mapping

from funcpipe.comm.collectives import transfers
from funcpipe.comm.sum_pattern import Move, Pattern, Piece, Transfer

Way = Callable[[int], Pattern]
"""How so many replicas sum their gradients."""

REPLICAS = range(2, 8)

_Object = tuple[Move, int, int]
"""The put that wrote an object: which one, of which replica, and its part."""


class SyncContract:
    """Inherit this; every method takes the fixture `way`."""

    def test_every_replica_has_every_sum_of_all_ranks(self, way: Way) -> None:
        """Ranks are recorded instead of added; `funcpipe.comm.gradient_chunks` adds in their order, groups first."""
        for replicas in REPLICAS:
            pattern = way(replicas)
            everything = {
                (q, split): tuple(range(replicas))
                for q in range(pattern.streams.rounds)
                for split in range(pattern.splits)
            }
            assert played(pattern) == dict.fromkeys(range(replicas), everything)

    def test_every_object_is_put_once_and_read(self, way: Way) -> None:
        """A request that nobody needs costs money in every step."""
        for replicas in REPLICAS:
            pattern = way(replicas)
            puts = [
                (t.move, r, t.part)
                for r in range(replicas)
                for t in transfers(pattern, r)
                if t.move in _SOURCE.values()
            ]
            gets = {
                (_SOURCE[t.move], t.peer, t.part)
                for r in range(replicas)
                for t in transfers(pattern, r)
                if t.move in _SOURCE
            }
            assert len(puts) == len(set(puts))
            assert set(puts) == gets

    def test_shares_are_those_of_the_pieces(self, way: Way) -> None:
        """The cost model and the throttle count bytes by them."""
        for replicas in REPLICAS:
            pattern = way(replicas)
            assert abs(pattern.piece_share * pattern.streams.rounds * pattern.splits - 1) < 1e-12


def played(pattern: Pattern) -> Mapping[int, Mapping[Piece, tuple[int, ...]]]:
    """What each replica has in the end of each piece: the ranks whose contributions were added, in ascending order.

    Raises AssertionError when replicas wait for each other for ever.
    """
    assert not pattern.server, "replicas alone are played"
    todo = {replica: dict(enumerate(transfers(pattern, replica))) for replica in range(pattern.replicas)}
    replicas = {replica: _Replica(pattern, replica) for replica in todo}
    objects: dict[_Object, dict[Piece, tuple[int, ...]]] = {}
    while any(todo.values()):
        ready = [
            (replica, position)
            for replica, left in todo.items()
            for position, transfer in left.items()
            if not any(need in left for need in transfer.after) and _is_there(transfer, objects)
        ]
        assert ready, f"replicas wait for ever: {todo}"
        for replica, position in ready:
            replicas[replica].do(todo[replica].pop(position), objects)
    return {number: replica.sums for number, replica in replicas.items()}


_SOURCE = {Move.GET_SPLIT: Move.PUT_SPLIT, Move.GET_MERGED: Move.PUT_MERGED}


def _is_there(transfer: Transfer, objects: Mapping[_Object, object]) -> bool:
    return transfer.peer is None or (_SOURCE[transfer.move], transfer.peer, transfer.part) in objects


class _Replica:
    """What one replica has read of the others, and the sums that it has."""

    def __init__(self, pattern: Pattern, number: int) -> None:
        self.sums: dict[Piece, tuple[int, ...]] = {}
        self._pattern = pattern
        self._number = number
        self._contributed: dict[Piece, tuple[int, ...]] = {}
        self._read: dict[Piece, dict[int, tuple[int, ...]]] = {}

    def do(self, transfer: Transfer, objects: dict[_Object, dict[Piece, tuple[int, ...]]]) -> None:
        """One transfer."""
        pattern, own = self._pattern, (transfer.move, self._number, transfer.part)
        match transfer.move:
            case Move.PUT_SPLIT:
                pieces = pattern.raw_pieces(self._number, transfer.part)
                objects[own] = {piece: self._contributed.get(piece, (self._number,)) for piece in pieces}
            case Move.GET_SPLIT:
                assert transfer.peer is not None
                came = objects[Move.PUT_SPLIT, transfer.peer, transfer.part]
                for piece in pattern.read_pieces(self._number, transfer.peer, transfer.part):
                    self._read.setdefault(piece, {})[transfer.peer] = came[piece]
            case Move.MERGE:
                grouped = pattern.grouped_pieces(self._number, transfer.part)
                split = pattern.merges(self._number)
                assert grouped or split is not None
                for piece in grouped or ((transfer.part, split or 0),):
                    read = self._read.get(piece, {})
                    peers = pattern.group_of(self._number) if grouped else range(pattern.replicas)
                    added = [rank for peer in peers for rank in read.pop(peer, ())]
                    added += self._contributed.get(piece, (self._number,))
                    (self._contributed if grouped else self.sums)[piece] = tuple(sorted(added))
            case Move.PUT_MERGED:
                objects[own] = {piece: self.sums[piece] for piece in pattern.merged_pieces(self._number, transfer.part)}
            case Move.GET_MERGED:
                assert transfer.peer is not None
                self.sums |= objects[Move.PUT_MERGED, transfer.peer, transfer.part]
