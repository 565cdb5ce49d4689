import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.collectives import pattern, transfers
from funcpipe.comm.sum_pattern import Move, Pattern, split_ranges
from funcpipe.core import Streams, Sync
from funcpipe.core.choices import open_downloads

streams = st.builds(Streams, st.integers(1, 6), st.integers(1, 8), st.integers(1, 6))
patterns = st.builds(pattern, st.sampled_from(Sync), st.integers(2, 9), st.none() | streams)


@given(st.integers(0, 1000), st.integers(1, 9))
def test_splits_are_those_of_numpy(length: int, splits: int) -> None:
    parts = np.array_split(np.arange(length), splits)
    assert [list(range(start, stop)) for start, stop in split_ranges(length, splits)] == [list(part) for part in parts]


def test_the_order_of_the_paper() -> None:
    """Worker 1 of 4: upload splits 2, 3, 0; download split 1 as written by workers 0, 3, 2; then merge and spread."""
    chosen = pattern(Sync.PIPELINED, 4)
    moves = transfers(chosen, 1)
    puts = [t.part for t in moves if t.move is Move.PUT_SPLIT]
    assert [chosen.raw_pieces(1, part) for part in puts] == [((0, 2),), ((0, 3),), ((0, 0),)]
    gets = [(t.peer, t.part) for t in moves if t.move is Move.GET_SPLIT]
    assert [(peer, chosen.raw_pieces(peer or 0, part)) for peer, part in gets] == [
        (0, ((0, 1),)),
        (3, ((0, 1),)),
        (2, ((0, 1),)),
    ]
    assert [t.peer for t in moves if t.move is Move.GET_MERGED] == [2, 3, 0]


def test_the_paper_s_steps_follow_each_other() -> None:
    """Step k waits for the upload and the download of step k-1: uploads in steps 1, 2, 3, downloads in 2, 3, 4."""
    moves = transfers(pattern(Sync.PIPELINED, 4), 0)
    step: list[int] = []
    for transfer in moves[:6]:
        step.append(1 + max((step[i] for i in transfer.after), default=0))
    assert [(t.move, s) for t, s in zip(moves[:6], step, strict=True)] == [
        (Move.PUT_SPLIT, 1),
        (Move.PUT_SPLIT, 2),
        (Move.GET_SPLIT, 2),
        (Move.PUT_SPLIT, 3),
        (Move.GET_SPLIT, 3),
        (Move.GET_SPLIT, 4),
    ]


@given(patterns)
def test_every_get_reads_an_object_that_is_put_and_holds_its_piece(chosen: Pattern) -> None:
    written: dict[tuple[Move, int, int], int] = {}
    for replica in range(chosen.replicas):
        for t in transfers(chosen, replica):
            if t.move in (Move.PUT_SPLIT, Move.PUT_MERGED):
                assert (t.move, replica, t.part) not in written
                written[t.move, replica, t.part] = 0
    for replica in range(chosen.replicas):
        for t in transfers(chosen, replica):
            if t.peer is None:
                continue
            assert t.peer != replica
            put = Move.PUT_SPLIT if t.move is Move.GET_SPLIT else Move.PUT_MERGED
            written[put, t.peer, t.part] += 1
            if t.move is Move.GET_SPLIT:
                read = chosen.read_pieces(replica, t.peer, t.part)
                assert read
                assert set(read) <= set(chosen.raw_pieces(t.peer, t.part))
    assert all(written.values()), "every object is read"


@given(st.integers(2, 9), streams)
def test_requests_of_a_replica_are_those_of_the_cost_model(replicas: int, cut_as: Streams) -> None:
    def count(sync: Sync) -> tuple[int, int]:
        moves = [t.move for t in transfers(pattern(sync, replicas, cut_as), 0)]
        puts = sum(move in (Move.PUT_SPLIT, Move.PUT_MERGED) for move in moves)
        return puts, sum(move in (Move.GET_SPLIT, Move.GET_MERGED) for move in moves)

    assert count(Sync.THREE_PHASE) == count(Sync.PIPELINED) == (replicas, 2 * (replicas - 1))
    assert count(Sync.EXCHANGE) == (cut_as.rounds, cut_as.rounds * (replicas - 1))
    rounds, merged = cut_as.rounds, min(cut_as.merged, cut_as.rounds)
    groups = -(-(replicas - 1) // -(-(replicas - 1) // min(cut_as.groups, replicas - 1)))
    assert count(Sync.STREAMED) == (rounds * groups + merged, (replicas - 1) * (rounds + merged))


@pytest.mark.parametrize("sync", Sync)
def test_a_replica_alone_moves_nothing(sync: Sync) -> None:
    moves = [t.move for t in transfers(pattern(sync, 1), 0)]
    assert set(moves) <= {Move.MERGE, Move.PUT_MERGED}


def test_open_downloads_grow_with_the_replicas_up_to_the_connections_of_a_client() -> None:
    assert [open_downloads(replicas) for replicas in (1, 4, 16, 100)] == [4, 16, 64, 64]
