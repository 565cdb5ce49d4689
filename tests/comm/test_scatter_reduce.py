import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.scatter_reduce import Move, split_ranges, transfers
from funcpipe.core import Sync


@given(st.integers(0, 1000), st.integers(1, 9))
def test_splits_are_those_of_numpy(length: int, splits: int) -> None:
    parts = np.array_split(np.arange(length), splits)
    assert [list(range(start, stop)) for start, stop in split_ranges(length, splits)] == [list(part) for part in parts]


def test_the_order_of_the_paper() -> None:
    """Worker 1 of 4: upload splits 2, 3, 0; download split 1 as written by workers 0, 3, 2; then merge and spread."""
    moves = transfers(Sync.PIPELINED, replicas=4, replica=1)
    assert [t.split for t in moves if t.move is Move.PUT_SPLIT] == [2, 3, 0]
    assert [(t.split, t.peer) for t in moves if t.move is Move.GET_SPLIT] == [(1, 0), (1, 3), (1, 2)]
    assert [t.split for t in moves if t.move is Move.PUT_MERGED] == [1]
    assert [(t.split, t.peer) for t in moves if t.move is Move.GET_MERGED] == [(2, 2), (3, 3), (0, 0)]


def played(sync: Sync, replicas: int, values: np.ndarray) -> list[np.ndarray]:
    """Play all replicas' moves on a dictionary, each as soon as it can; what every replica ends with."""
    ranges = split_ranges(values.shape[1], replicas)
    own = [row.copy() for row in values]
    objects: dict[tuple[str, int, int], np.ndarray] = {}
    pieces: list[list[np.ndarray]] = [[] for _ in range(replicas)]
    todo = [(r, i) for r in range(replicas) for i in range(len(transfers(sync, replicas=replicas, replica=r)))]
    done: set[tuple[int, int]] = set()
    while todo:
        ready = [item for item in todo if can(item, sync, replicas, done, objects)]
        assert ready, "the replicas wait for each other"
        for r, i in ready:
            t = transfers(sync, replicas=replicas, replica=r)[i]
            start, stop = ranges[t.split]
            match t.move:
                case Move.PUT_SPLIT:
                    objects["split", r, t.split] = own[r][start:stop].copy()
                case Move.GET_SPLIT:
                    pieces[r].append(objects["split", t.peer or 0, t.split])
                case Move.MERGE:
                    own[r][start:stop] += sum(pieces[r])
                case Move.PUT_MERGED:
                    objects["merged", r, t.split] = own[r][start:stop].copy()
                case Move.GET_MERGED:
                    own[r][start:stop] = objects["merged", t.peer or 0, t.split]
            done.add((r, i))
            todo.remove((r, i))
    return own


def can(
    item: tuple[int, int],
    sync: Sync,
    replicas: int,
    done: set[tuple[int, int]],
    objects: dict[tuple[str, int, int], np.ndarray],
) -> bool:
    r, i = item
    t = transfers(sync, replicas=replicas, replica=r)[i]
    if not all((r, j) in done for j in t.after):
        return False
    name = {Move.GET_SPLIT: "split", Move.GET_MERGED: "merged"}.get(t.move)
    return name is None or (name, t.peer or 0, t.split) in objects


@pytest.mark.parametrize("sync", Sync)
@given(replicas=st.integers(2, 9), length=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_every_replica_ends_with_the_sum_of_all_its_own_included(
    sync: Sync, replicas: int, length: int, seed: int
) -> None:
    values = np.random.default_rng(seed).integers(-1000, 1000, (replicas, length))
    for row in played(sync, replicas, values):
        assert row.tolist() == values.sum(axis=0).tolist()


@given(st.integers(2, 9))
def test_a_worker_puts_n_objects_and_gets_twice_n_minus_one(replicas: int) -> None:
    moves = [t.move for t in transfers(Sync.PIPELINED, replicas=replicas, replica=0)]
    assert sum(move in (Move.PUT_SPLIT, Move.PUT_MERGED) for move in moves) == replicas
    assert sum(move in (Move.GET_SPLIT, Move.GET_MERGED) for move in moves) == 2 * (replicas - 1)
