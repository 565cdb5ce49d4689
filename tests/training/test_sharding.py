"""An optimiser that is divided over replicas: the same bits as one that is not, in other places."""

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.gradient_chunks import GradientChunks
from funcpipe.comm.piece_ranges import piece_ranges
from funcpipe.core import Plan, Routes, Streams, Sync, TieRoute, Wire
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.platforms.wrappers import Counted
from funcpipe.scheduler.graph import build_graph
from funcpipe.scheduler.tasks import Kind
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.gradients import FlatGradient
from funcpipe.training.optimizer_division import check_sharding
from funcpipe.training.optimizers import ParameterShape
from funcpipe.training.sharding import ShardedOptimizer, combine_shards, unshard
from funcpipe.worker.loop import Worker
from funcpipe.worker.synchronisation import Synchronisation
from tests.e2e.plans import even_plan, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.examples import at_most
from tests.in_process import make_job, prepared_run, run_workers
from tests.support.plans import sum_shape
from tests.support.run_keys import RUN_KEY
from tests.worker.test_buckets import model, vectors
from tests.worker.test_synchronisation import possible_order, streams

NO_ROUTES = Routes(activations=(), gradients=())
WEIGHT = ParameterShape(name="weight", shape=(31, 33), dtype=torch.float32)


def grouped(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Weight decay for matrices alone, as is usual."""
    found = list(parameters)
    groups = [{"params": [p for p in found if p.dim() > 1], "weight_decay": 0.1}]
    return optim.AdamW([*groups, {"params": [p for p in found if p.dim() <= 1], "weight_decay": 0.0}], lr=0.02)


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(optim.Adam, lr=0.02, amsgrad=True),
    "adamw": grouped,
    "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
}
WAYS = [(Sync.THREE_PHASE, None), (Sync.PIPELINED, None), (Sync.STREAMED, Streams(4, 2, 2))]


def cases() -> Iterator[Any]:
    """Every optimiser, and every way with two and with three replicas; all together in the long run."""
    often = {
        *(("sgd", WAYS[0], 3), ("momentum", WAYS[1], 2), ("adam", WAYS[2], 3)),
        *(("adamw", WAYS[2], 2), ("adamw", WAYS[0], 2), ("adagrad", WAYS[1], 3)),
    }
    for case in itertools.product(OPTIMIZERS, WAYS, (2, 3)):
        yield pytest.param(*case, False, marks=[] if case in often else [pytest.mark.long])
    yield pytest.param("momentum", WAYS[1], 2, True)


def plan_of(sync: Sync, cut_as: Streams | None, replicas: int, *, sharded: bool, recompute: bool = False) -> Plan:
    plan = even_plan(
        model(),
        (torch.zeros(3, 5).double(),),
        stages=2,
        replicas=replicas,
        micro_batch=3,
        micro_batches=2,
        recompute=recompute,
        sync=sync,
    )
    return replace(plan, streams=cut_as, shard_optimizer=sharded)


def trained(plan: Plan, optimizer: Callable[[Any], optim.Optimizer]) -> dict[str, Worker]:
    job = make_job(model(), plan, vectors, loss=F.cross_entropy, optimizer=optimizer, epochs=2)
    return run_workers(job, MemoryStorage())


def states(workers: dict[str, Worker], stage: int, replicas: int) -> list[dict[str, Tensor]]:
    """What the replicas of a stage know: the model of each, and the optimiser of all together."""
    parts = [workers[f"s{stage}.r{r}"].computation.state() for r in range(replicas)]
    optimizer = unshard(combine_shards(parts)) if workers[f"s{stage}.r0"].computation.is_sharded else parts[0]
    kept = {name: tensor for name, tensor in optimizer.tensors.items() if name.startswith("optimizer/")}
    return [*(dict(part.state_dict()) for part in parts), kept]


def assert_same_bits(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            assert one[name].numpy().tobytes() == tensor.numpy().tobytes(), name


@pytest.mark.parametrize(
    ("optimizer", "way", "replicas", "recompute"),
    [*cases()],
)
def test_a_divided_optimiser_gives_the_same_bits_and_equals_one_process(
    optimizer: str, way: tuple[Sync, Streams | None], replicas: int, recompute: bool
) -> None:
    """Of the parameters on every replica, and of the optimiser's state; one parameter never has a gradient.

    Adam divides small gradients by their size, and so amplifies what sums in another order leave in the last bits.
    """
    make = OPTIMIZERS[optimizer]
    plan = plan_of(*way, replicas, sharded=True, recompute=recompute)
    found, plain = trained(plan, make), trained(replace(plan, shard_optimizer=False), make)
    expected = copy.deepcopy(model())
    train(expected, vectors(), loss_fn=F.cross_entropy, optimizer=make, steps=sample_numbers(plan, 27, epochs=2))
    for stage in range(2):
        own = states(found, stage, replicas)
        assert_same_bits(own, states(plain, stage, replicas))
        reference = {name: expected.state_dict()[name] for name in own[0]}
        assert largest_difference(own[0], reference) < 1e-8


def test_a_replica_keeps_its_share_of_the_state_and_no_more() -> None:
    workers = trained(plan_of(Sync.STREAMED, Streams(3, 1, 1), 3, sharded=True), OPTIMIZERS["momentum"])
    kept = [
        [t.numel() for n, t in worker.computation.state().tensors.items() if n.startswith("optimizer/")]
        for name, worker in workers.items()
        if name.startswith("s0")
    ]
    summed = 40 * 6 + 2 * 40  # and 81 elements of statistics, whose share of the splits has no state
    assert sum(map(sum, kept)) == summed
    assert max(map(sum, kept)) <= (summed + 81) / 3 + 3


class Replica:
    """The parameters of one replica and its part of the optimiser, or all of it."""

    def __init__(self, shapes: list[tuple[int, ...]], optimizer: Callable[[Any], optim.Optimizer]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.optimizer = optimizer(self.parameters)

    def flat(self, gradients: list[Tensor | None], extra: Tensor) -> FlatGradient:
        flat = FlatGradient(self.parameters, [extra])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        flat.complete([extra])
        return flat


@at_most(60)
@given(
    way=st.sampled_from([Sync.THREE_PHASE, Sync.PIPELINED, Sync.STREAMED]),
    replicas=st.integers(2, 6),
    cut_as=st.none() | streams,
    shapes=st.lists(st.sampled_from([(), (1,), (2,), (3, 5), (17,), (2, 0), (4, 3, 2)]), min_size=1, max_size=5),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_any_sizes_rounds_and_replicas_give_the_bits_and_the_traffic_of_sums(
    way: Sync,
    replicas: int,
    cut_as: Streams | None,
    shapes: list[tuple[int, ...]],
    optimizer: str,
    seed: int,
    data: st.DataObject,
) -> None:
    """Tasks in any order, gradients present or not, three steps of both kinds side by side."""
    make, generator = OPTIMIZERS[optimizer], torch.Generator().manual_seed(seed)
    graph = build_graph(sum_shape(way, replicas, cut_as))
    chosen = sum_shape(way, replicas, cut_as).pattern_of(0)
    plain = [Replica(shapes, make) for _ in range(replicas)]
    parts = [Replica(shapes, make) for _ in range(replicas)]
    layout = parts[0].flat([None] * len(shapes), torch.zeros(3)).layout
    ranges = piece_ranges(layout.elements, chosen, layout.head)
    sharded = [
        ShardedOptimizer(part.optimizer, part.flat([None] * len(shapes), torch.zeros(3)).layout, [q[r] for q in ranges])
        for r, part in enumerate(parts)
    ]
    for step in range(3):
        present = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
        rows: list[list[Tensor | None]] = [
            [
                torch.randn(shape, generator=generator) if here and (step or (r + i) % 2 == 0) else None
                for i, (shape, here) in enumerate(zip(shapes, present, strict=True))
            ]
            for r in range(replicas)
        ]
        extra = torch.randn(3, generator=generator)
        sums = [one.flat(row, extra) for one, row in zip(plain, rows, strict=True)]
        updates = [one.flat(row, extra) for one, row in zip(parts, rows, strict=True)]
        order = possible_order(graph, random.Random(seed))
        expected_traffic = run(graph, chosen, sums, order, [None] * replicas)
        assert run(graph, chosen, updates, order, [one.update for one in sharded]) == expected_traffic
        for one, flat in zip(plain, sums, strict=True):
            expected_extras = flat.unpack_gradients()
            one.optimizer.step()
        for part, flat, one in zip(parts, updates, plain, strict=True):
            assert torch.equal(flat.unpack_parameters()[0], expected_extras[0])
            for found, expected in zip(part.parameters, one.parameters, strict=True):
                assert found.detach().numpy().tobytes() == expected.detach().numpy().tobytes()


def after_merge(update: Any, fragment: int, round_number: int, values: torch.Tensor) -> None:
    assert fragment == 0, "gradients are not summed in fragments"
    update(round_number, values)


def run(graph: Any, chosen: Any, flats: list[FlatGradient], order: list[int], merged: list[Any]) -> list[Any]:
    """Do the tasks of a synchronisation; the traffic of each replica."""
    shared = MemoryStorage()
    stores = [Counted(shared) for _ in flats]
    doers = []
    for replica, store in enumerate(stores):
        channel = Channel(store, ArrivalEstimator(deadline_s=0.001), run_key=RUN_KEY, cancel=threading.Event())
        hook = {} if merged[replica] is None else {"after_merge": partial(after_merge, merged[replica])}
        doers.append(Synchronisation(channel, chosen, replica, str, **hook))
    pieces = [GradientChunks(flat.vector, chosen, flat.layout.head) for flat in flats]
    for position in order:
        task = graph.tasks[position]
        if task.kind in (Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.MERGE, Kind.PUT_MERGED, Kind.GET_MERGED):
            doers[task.replica].run(task, pieces[task.replica])
    return [store.traffic for store in stores]


def scheduled(parameters: Any) -> optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.1)
    rates = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: rates.step())
    return optimizer


class Noisy(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(torch.randn_like(parameter), alpha=0.01)


ELEMENT_WISE: list[Callable[[Any], optim.Optimizer]] = [
    *OPTIMIZERS.values(),
    *(optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.ASGD),
    partial(optim.AdamW, foreach=True),
]
OTHERS: list[Callable[[Any], optim.Optimizer]] = [
    *(optim.LBFGS, optim.Adafactor, optim.Muon, optim.SparseAdam, scheduled, partial(Noisy, lr=0.1)),
    partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),  # whose bits depend on where an element stands
]


@pytest.mark.parametrize("make", ELEMENT_WISE, ids=range(len(ELEMENT_WISE)))
def test_optimisers_that_update_each_element_by_itself_are_divided(make: Callable[[Any], optim.Optimizer]) -> None:
    before = torch.get_rng_state()
    check_sharding(make, [WEIGHT], [["weight"]], NO_ROUTES)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", OTHERS, ids=range(len(OTHERS)))
def test_other_optimisers_are_refused_with_the_way_out(make: Callable[[Any], optim.Optimizer]) -> None:
    with pytest.raises(PlanError, match=r"cannot be divided over replicas: .* or a plan without shard_optimizer"):
        check_sharding(make, [WEIGHT], [["weight"]], NO_ROUTES)


def test_stages_that_share_parameters_are_refused() -> None:
    tie = TieRoute(stages=(0, 2), parameters=("words.weight",), payload_bytes=4)
    with pytest.raises(PlanError, match=r"as 0 and 2 share words\.weight; keep its layers together"):
        check_sharding(OPTIMIZERS["adam"], [WEIGHT], [["weight"]], Routes(activations=(), gradients=(), ties=(tie,)))


def test_clipping_by_the_norm_is_refused() -> None:
    plan = plan_of(Sync.PIPELINED, None, 2, sharded=True)
    job = make_job(model(), plan, vectors, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], clip_grad_norm=1.0)
    with pytest.raises(PlanError, match="before the norm of the whole gradient is known"):
        prepared_run(job, MemoryStorage())


def test_what_cannot_go_with_it_is_refused_where_the_plan_is_made() -> None:
    plan = plan_of(Sync.PIPELINED, None, 2, sharded=True)
    with pytest.raises(
        InvalidValue, match="must be one of three-phase, pipelined, streamed, hierarchical with shard_optimizer"
    ):
        replace(plan, sync=Sync.EXCHANGE)
    with pytest.raises(InvalidValue, match="must be fp32, bf16 or int8 with shard_optimizer"):
        replace(plan, wire=Wire.FP16)
    assert not replace(plan, replicas=1, sync=Sync.EXCHANGE).is_sharded
