"""All replicas' tasks, really put and got, in any order that their dependencies admit."""

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import Pattern, Transfer, pattern, transfers
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.core import RequestCounts, Routes, ScheduleKind, Streams, Sync
from funcpipe.platforms.wrappers import Counted
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.tasks import Kind, Task, source_of
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.run_keys import RUN_KEY
from funcpipe.worker.synchronisation import Synchronisation
from tests.scheduler.check import check

DTYPES = (torch.float32, torch.float64)
streams = st.builds(Streams, st.integers(1, 6), st.integers(1, 8), st.integers(1, 6))


def synchronised(
    shape: StepShape, vectors: torch.Tensor, order: random.Random
) -> tuple[torch.Tensor, list[RequestCounts]]:
    """What every replica holds after its tasks, done one at a time in an order drawn from those that are possible."""
    graph = build_graph(shape)
    check(graph)
    result = vectors.clone()
    stores: list[Counted] = []
    shared = MemoryStorage()
    doers, pieces = [], []
    for replica, row in enumerate(result):
        stores.append(Counted(shared))
        channel = Channel(stores[-1], ArrivalEstimator(deadline_s=0.001), run_key=RUN_KEY, cancel=threading.Event())
        doers.append(Synchronisation(channel, shape.pattern, replica, str))
        pieces.append(GradientChunks(row, shape.pattern))
    for position in possible_order(graph, order):
        task = graph.tasks[position]
        if task.kind in (Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.MERGE, Kind.PUT_MERGED, Kind.GET_MERGED):
            doers[task.replica].run(task, pieces[task.replica])
    return result, [store.traffic for store in stores]


def possible_order(graph: Graph, order: random.Random) -> list[int]:
    done: list[int] = []
    left = set(range(len(graph.tasks)))
    while left:
        ready = [position for position in sorted(left) if not left & set(graph.needs[position])]
        done.append(order.choice(ready))
        left.remove(done[-1])
    return done


def shape_of(sync: Sync, replicas: int, cut_as: Streams | None = None) -> StepShape:
    return StepShape(
        stages=1,
        replicas=replicas,
        micro_batches=replicas,
        routes=Routes(activations=(), gradients=()),
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        streams=cut_as,
    )


@pytest.mark.parametrize("sync", Sync)
@given(
    replicas=st.integers(1, 9),
    length=st.integers(0, 60),
    cut_as=st.none() | streams,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_replica_ends_with_numpy_s_sum_added_in_rank_order(
    sync: Sync, replicas: int, length: int, cut_as: Streams | None, dtype: torch.dtype, seed: int
) -> None:
    values = np.random.default_rng(seed).standard_normal((replicas, length))
    vectors = torch.from_numpy(values).to(dtype)
    expected = vectors[0].numpy().copy()
    for row in vectors[1:].numpy():
        expected += row
    found, _ = synchronised(shape_of(sync, replicas, cut_as), vectors, random.Random(seed))
    for row in found:
        assert row.numpy().tobytes() == expected.tobytes()


def headers(messages: int) -> range:
    return range(64 * messages, 192 * messages + 1)


@pytest.mark.parametrize(("sync", "cut_as"), [(Sync.THREE_PHASE, None), (Sync.STREAMED, Streams(4, 2, 2))])
def test_traffic_is_what_the_formulas_say_and_headers(sync: Sync, cut_as: Streams | None) -> None:
    """Per worker up (n-1)/n s + s/n, down 2 (n-1)/n s, for s bytes that n = 4 replicas sum."""
    length, replicas = 64 * 1024, 4
    _, traffic = synchronised(shape_of(sync, replicas, cut_as), torch.ones(replicas, length), random.Random(0))
    chosen = pattern(sync, replicas, cut_as)
    pieces = chosen.streams.rounds * (replicas - 1)
    for one in traffic:
        assert one.sent_bytes - 4 * length in headers(pieces + chosen.streams.rounds)
        assert one.received_bytes - 2 * 4 * length * (replicas - 1) // replicas in headers(2 * pieces)
        assert one.empty_gets == 0


@given(replicas=st.integers(1, 9), length=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_a_parameter_server_gives_every_replica_numpy_s_sum(replicas: int, length: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((replicas, length)).astype(np.float32)
    expected = values[0].copy()
    for row in values[1:]:
        expected += row
    chosen = Pattern(Sync.ALL_REDUCE, replicas, Streams(1, 1, 1), server=True)
    vectors = torch.from_numpy(np.concatenate([values, np.zeros((1, length), dtype=np.float32)]))
    storage = MemoryStorage()
    left = {(worker, i) for worker in range(chosen.workers) for i in range(len(transfers(chosen, worker)))}
    pieces = [GradientChunks(row, chosen) for row in vectors]
    channel = Channel(storage, ArrivalEstimator(deadline_s=0.001), run_key=RUN_KEY, cancel=threading.Event())
    doers = [Synchronisation(channel, chosen, worker, str) for worker in range(chosen.workers)]
    for worker in [*range(replicas), replicas, *range(replicas)]:
        for i, transfer in enumerate(transfers(chosen, worker)):
            got = transfer.peer is None or storage.list(str(source_of(task_of(transfer, worker))))
            if (worker, i) in left and got and not any((worker, need) in left for need in transfer.after):
                doers[worker].run(task_of(transfer, worker), pieces[worker])
                left.remove((worker, i))
    assert not left
    assert all(row.numpy().tobytes() == expected.tobytes() for row in vectors)


def task_of(transfer: Transfer, worker: int) -> Task:
    return Task(Kind(transfer.move.value), 0, worker, peer=transfer.peer, part=transfer.part)
