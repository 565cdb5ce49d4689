"""All replicas' tasks, really put and got, in any order that their dependencies admit."""

import random
import threading
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe.analysis.predict import predict
from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import pattern, transfers
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.comm.int8_chunks import gradient_chunks, new_feedback
from funcpipe.comm.sum_pattern import Pattern, Transfer
from funcpipe.core import (
    SYNC_WIRES,
    LayerProfile,
    ModelProfile,
    Plan,
    RequestCounts,
    ScheduleKind,
    Stage,
    Streams,
    Sync,
    Wire,
)
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.wrappers import Counted
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.tasks import SIDE_BY_SIDE, Kind, Task, source_of
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.synchronisation import Synchronisation
from tests.e2e.reference import Order, order_of
from tests.scheduler.check import check
from tests.support.plans import sum_shape
from tests.support.run_keys import RUN_KEY

SPEC = load_spec("aws-lambda")
DTYPES = (torch.float32, torch.float64)
streams = st.builds(Streams, st.integers(1, 6), st.integers(1, 8), st.integers(1, 6))
each_way = settings(max_examples=max(20, 2 * settings().max_examples // 5))
"""Examples for each of the four ways: together more than the profile asks of one property."""


def synchronised(
    shape: StepShape, vectors: torch.Tensor, order: random.Random, *, head: int = 0, wire: Wire = Wire.FP32
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
        doers.append(Synchronisation(channel, shape.pattern_of(0), replica, str))
        pieces.append(GradientChunks(row, shape.pattern_of(0), head, wire=wire))
    for position in possible_order(graph, order):
        task = graph.tasks[position]
        if task.kind in (Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.MERGE, Kind.PUT_MERGED, Kind.GET_MERGED):
            doers[task.replica].run(task, pieces[task.replica])
    return result, [store.traffic for store in stores]


def chunks_of(rows: torch.Tensor, plan: Plan) -> list[GradientChunks]:
    """The pieces of what each replica holds, as functions cut them."""
    chosen = pattern(plan.sync, plan.replicas, plan.streams)
    kept = [new_feedback(row, chosen, replica, wire=plan.wire_sync) for replica, row in enumerate(rows)]
    return [
        gradient_chunks(row, chosen, wire=plan.wire_sync, merged_wire=plan.merged_wire, feedback=own)
        for row, own in zip(rows, kept, strict=True)
    ]


@pytest.mark.parametrize("wire", SYNC_WIRES)
@pytest.mark.parametrize(("sync", "sharded"), [(sync, False) for sync in Sync] + [(Sync.STREAMED, True)])
def test_every_transfer_moves_the_bytes_that_are_predicted_and_headers(sync: Sync, sharded: bool, wire: Wire) -> None:
    replicas, length = 4, 48 * 256  # whole blocks in each piece
    plan = Plan(
        global_batch=replicas,
        micro_batch=1,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        wire=Wire.FP32,
        wire_sync=wire,
        shard_optimizer=sharded,
        stages=(Stage(first=0, stop=1, size="10240MB", memory_mb=10240),),
    )
    predicted = {event.task: event.payload_bytes for event in predict(plan, one_layer(4 * length), SPEC).events}
    graph = build_graph(sum_shape(sync, replicas))
    storage, done = MemoryStorage(), 0
    channel = Channel(storage, ArrivalEstimator(deadline_s=0.001), run_key=RUN_KEY, cancel=threading.Event())
    chosen, pieces = pattern(sync, replicas), chunks_of(torch.ones(replicas, length), plan)
    for position in possible_order(graph, random.Random(0)):
        task = graph.tasks[position]
        if task.kind in SIDE_BY_SIDE or task.kind is Kind.MERGE:
            found = Synchronisation(channel, chosen, task.replica, str).run(task, pieces[task.replica])
            if task.kind is not Kind.MERGE:
                assert found.payload_bytes - predicted[str(task)] in headers(
                    messages_of(task, chosen) * (1 + (wire is Wire.INT8))
                ), task
                done += 1
    assert done == sum(name.startswith(("put-", "get-")) for name in predicted)


def messages_of(task: Task, chosen: Pattern) -> int:
    assert task.part is not None
    if task.kind is Kind.PUT_SPLIT:
        return len(chosen.raw_pieces(task.replica, task.part))
    if task.kind is Kind.GET_SPLIT:
        return len(chosen.read_pieces(task.replica, task.peer or 0, task.part))
    return len(chosen.merged_pieces(task.replica if task.peer is None else task.peer, task.part))


def one_layer(parameter_bytes: int) -> ModelProfile:
    none = (0.0,) * len(SPEC.sizes)
    layer = LayerProfile(name="l", parameter_bytes=parameter_bytes, activation_bytes=0, forward_s=none, backward_s=none)
    sizes = tuple(size.name for size in SPEC.sizes)
    return ModelProfile(
        model="m", micro_batch=1, platform=SPEC.name, sizes=sizes, base_memory_bytes=0, layers=(layer,), tensors=()
    )


def possible_order(graph: Graph, order: random.Random) -> list[int]:
    missing = [len(set(graph.needs[position])) for position in range(len(graph.tasks))]
    followers: dict[int, list[int]] = {}
    for position in range(len(graph.tasks)):
        for need in set(graph.needs[position]):
            followers.setdefault(need, []).append(position)
    done: list[int] = []
    ready = [position for position, count in enumerate(missing) if not count]
    while ready:
        done.append(ready.pop(order.randrange(len(ready))))
        for follower in followers.get(done[-1], ()):
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    assert len(done) == len(graph.tasks)
    return done


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest number whose lower 16 bits are 0, and to the even one of two that are as near."""
    bits = values.view(np.uint32)
    found: np.ndarray = (bits + (0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return found


@pytest.mark.parametrize("wire", [Wire.FP32, Wire.BF16])
@pytest.mark.parametrize("sync", Sync)
@each_way
@given(
    replicas=st.integers(1, 9),
    length=st.integers(0, 60),
    head=st.integers(0, 9),
    cut_as=st.none() | streams,
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([2.0**-140, 1e-20, 1.0, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_end_with_numpy_s_sum_in_rank_order_groups_first_of_what_each_has_rounded_and_the_head_is_exact(
    sync: Sync,
    wire: Wire,
    replicas: int,
    length: int,
    head: int,
    cut_as: Streams | None,
    dtype: torch.dtype,
    magnitude: float,
    seed: int,
) -> None:
    """Numbers of 64 bits are not rounded."""
    rounds = wire is Wire.BF16 and dtype is torch.float32
    replicas, rounded = (max(replicas, 2), nearest_bf16) if rounds else (replicas, np.copy)
    values = magnitude * np.random.default_rng(seed).standard_normal((replicas, head + length))
    vectors = torch.from_numpy(values).to(dtype)
    rows = vectors.numpy()

    def total(order: Order, rounded: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        added = [rounded(rows[one]) if isinstance(one, int) else total(one, rounded) for one in order]
        return rounded(reduce(np.add, added))

    order = order_of(sync, replicas, cut_as)
    exact = total(order, np.copy)
    expected = np.concatenate([exact[:head], total(order, rounded)[head:]])
    found, _ = synchronised(sum_shape(sync, replicas, cut_as), vectors, random.Random(seed), head=head, wire=wire)
    for row in found:
        assert row.numpy().tobytes() == expected.tobytes()


def test_infinity_and_what_is_no_number_reach_every_replica() -> None:
    vectors = torch.ones(3, 12)
    vectors[0, 1], vectors[1, 4], vectors[2, 7], vectors[:, 9] = torch.inf, -torch.inf, torch.nan, 3e38
    for sync in Sync:
        found, _ = synchronised(sum_shape(sync, 3), vectors, random.Random(0), wire=Wire.BF16)
        for row in found:
            assert row[1] == torch.inf
            assert row[4] == -torch.inf
            assert row[7].isnan()
            assert row[9] == torch.inf
            assert row.isfinite().sum() == 8


def headers(messages: int) -> range:
    return range(64 * messages, 192 * messages + 1)


@pytest.mark.parametrize("wire", [Wire.FP32, Wire.BF16])
@pytest.mark.parametrize(("sync", "cut_as"), [(Sync.THREE_PHASE, None), (Sync.STREAMED, Streams(4, 2, 2))])
def test_traffic_is_what_the_formulas_say_and_headers(sync: Sync, cut_as: Streams | None, wire: Wire) -> None:
    """Per worker up (n-1)/n s + s/n, down 2 (n-1)/n s, for s bytes that n = 4 replicas sum."""
    length, replicas, size = 64 * 1024, 4, {Wire.FP32: 4, Wire.BF16: 2}[wire]
    vectors = torch.ones(replicas, length)
    _, traffic = synchronised(sum_shape(sync, replicas, cut_as), vectors, random.Random(0), wire=wire)
    chosen = pattern(sync, replicas, cut_as)
    pieces = chosen.streams.rounds * (replicas - 1)
    for one in traffic:
        assert one.sent_bytes - size * length in headers(pieces + chosen.streams.rounds)
        assert one.received_bytes - 2 * size * length * (replicas - 1) // replicas in headers(2 * pieces)
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
