"""Gradients summed in 16 and 8 bits: the bits of one process that rounds at the same places, however they are summed,
and that keeps what rounding to 8 bits takes.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from funcpipe.core import Plan, Precision, ScheduleKind, Streams, Sync, TrainingSpec, Wire
from funcpipe.errors import InvalidValue
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.loop import Worker
from tests.e2e.int8_sums import Int8Sums
from tests.e2e.networks import Lopsided
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, order_of, train
from tests.examples import in_long_run
from tests.in_process import make_job, run_workers
from tests.training import test_ties

adam: Callable[..., optim.Optimizer] = partial(optim.AdamW, lr=0.02)
SAMPLES = 28
WAYS = [
    *[(sync, None) for sync in (Sync.THREE_PHASE, Sync.PIPELINED, Sync.ALL_REDUCE)],
    *[(Sync.EXCHANGE, Streams(3, 1, 1)), (Sync.STREAMED, Streams(4, 2, 2))],
    *[(Sync.HIERARCHICAL, None), (Sync.TREE, Streams(3, 2, 3))],
]
DIVIDED = {WAYS[0]: 3, WAYS[4]: 3, WAYS[1]: 2, WAYS[5]: 4}
"""Ways of summing that divide the optimiser, and with how many replicas each is tried."""


def model(wire: Wire = Wire.FP32) -> nn.Module:
    """In 8 bits, one of several blocks."""
    torch.manual_seed(2)
    return Lopsided(wide=300, narrow=7) if wire is Wire.INT8 else Lopsided(wide=40, narrow=3)


def vectors() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, generator=generator), torch.tensor(i % 5)) for i in range(SAMPLES)]


def plan_of(way: tuple[Sync, Streams | None], replicas: int, wire: Wire, **options: Any) -> Plan:
    """Two stages, three micro-batches of two samples for each replica, with backwards in the order of one process."""
    sync, cut_as = way
    plan = even_plan(
        *(model(wire), (torch.zeros(2, 5),)),
        stages=2,
        replicas=replicas,
        micro_batch=2,
        micro_batches=3,
        sync=sync,
        wire_sync=wire,
    )
    return replace(plan, streams=cut_as, schedule=ScheduleKind.ONE_F_ONE_B, **options)


def trained(plan: Plan, optimizer: Callable[[Any], optim.Optimizer] = momentum) -> dict[str, Worker]:
    job = make_job(model(plan.wire_sync), plan, vectors, loss=F.cross_entropy, optimizer=optimizer, epochs=2)
    return run_workers(job, MemoryStorage())


def in_one_process(
    workers: dict[str, Worker],
    plan: Plan,
    optimizer: Callable[[Any], optim.Optimizer] = momentum,
    *,
    exact: bool = False,
    feeds_back: bool = True,
) -> dict[str, Tensor]:
    """What one process has that rounds where the `workers` of `plan` do, or nowhere if it is `exact`."""
    expected = model(plan.wire_sync)
    order = order_of(plan.sync, plan.replicas, plan.streams)
    how: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": optimizer, "replicas": plan.replicas}
    how["order"] = order
    if plan.wire_sync is Wire.BF16 and not exact:
        how["rounded"] = torch.bfloat16
    if plan.wire_sync is Wire.INT8:
        place = {name: i for i, (name, _) in enumerate(expected.named_parameters())}
        held = [workers[f"s{stage}.r0"].computation.state().tensors for stage in range(len(plan.stages))]
        stages = [[i for name, i in place.items() if f"model/{name}" in own] for own in held]
        sizes = [p.numel() for p in expected.parameters()]
        how["int8"] = Int8Sums(stages, sizes, feeds_back=feeds_back, order=order)
    train(expected, vectors(), steps=sample_numbers(plan, SAMPLES, epochs=2), **how)
    return expected.state_dict()


def assert_every_worker_has(workers: dict[str, Worker], expected: dict[str, Tensor]) -> None:
    """The same bits, but in running statistics, which are averaged in another order."""
    for worker, one in workers.items():
        for name, found in one.computation.state().state_dict().items():
            if "running" in name:
                assert torch.allclose(found, expected[name], rtol=1e-6, atol=1e-7), (worker, name)
            else:
                assert found.numpy().tobytes() == expected[name].numpy().tobytes(), (worker, name)


def divided() -> Iterator[Any]:
    """Each way with one wire; with both, and with other numbers of replicas, in the long run."""
    wires = (Wire.BF16, Wire.INT8)
    often = [(way, replicas, wires[i % 2]) for i, (way, replicas) in enumerate(DIVIDED.items())]
    more = [*DIVIDED.items(), (WAYS[0], 2), (WAYS[1], 3), (WAYS[4], 2)]
    every = [(*way, wire) for way in more for wire in wires]
    return itertools.chain(often, in_long_run(case for case in every if case not in often))


def summed() -> Iterator[Any]:
    """Every way once in 32, 16 and 8 bits; with all numbers of replicas in the long run."""
    for (i, way), replicas, wire in itertools.product(enumerate(WAYS), (2, 3, 4), (Wire.BF16, Wire.FP32, Wire.INT8)):
        chosen = {Wire.BF16: (2 + i % 2,), Wire.INT8: (4 - i % 2,), Wire.FP32: (2 if i else 3,)}[wire]
        chosen = (4,) if way[0] in (Sync.HIERARCHICAL, Sync.TREE) else chosen  # fewer are one group, or one level
        marks = [] if replicas in chosen else [pytest.mark.long]
        yield pytest.param(way, replicas, wire, marks=marks, id=f"{wire.value}-{replicas}-{way[0].value}")


@pytest.mark.parametrize(("way", "replicas", "wire"), [*summed()])
def test_every_way_of_summing_has_the_bits_of_one_process_that_rounds_as_it_does(
    way: tuple[Sync, Streams | None], replicas: int, wire: Wire
) -> None:
    """Splits are uneven, the last step is short, the statistics of BatchNorm are summed along, and one parameter has
    no gradient. Rounded statistics would be off by up to 1/256.
    """
    plan = plan_of(way, replicas, wire)
    workers = trained(plan)
    assert_every_worker_has(workers, in_one_process(workers, plan))


def test_rounding_shows_and_feedback_does() -> None:
    plan = plan_of(WAYS[1], 2, Wire.BF16)
    exact, rounded = (in_one_process({}, plan, exact=exact)["last.weight"] for exact in (True, False))
    difference = (exact - rounded).abs().max() / exact.abs().max()
    assert 1e-5 < difference < 2.0**-7
    plan = plan_of(WAYS[1], 2, Wire.INT8)
    workers = trained(plan)
    with_it, without = (in_one_process(workers, plan, feeds_back=feeds)["last.weight"] for feeds in (True, False))
    assert not torch.equal(with_it, without)


@pytest.mark.parametrize(("way", "replicas", "wire"), [*divided()])
def test_a_divided_optimiser_sums_alike_and_keeps_its_parameters_exact(
    way: tuple[Sync, Streams | None], replicas: int, wire: Wire
) -> None:
    """Parameters rounded to 16 bits would lose nearly all of their updates."""
    plan = plan_of(way, replicas, wire, shard_optimizer=True)
    workers = trained(plan, adam)
    assert_every_worker_has(workers, in_one_process(workers, plan, adam))


def test_losses_must_not_be_scaled_in_8_bits() -> None:
    with pytest.raises(InvalidValue, match="wire_sync"):
        plan_of(WAYS[1], 2, Wire.INT8, precision=Precision.FP16)
    with pytest.raises(InvalidValue, match="wire_back"):
        TrainingSpec(global_batch=8, wire_sync=Wire.INT8, wire_back=Wire.FP16)


def test_copies_of_tied_parameters_stay_equal() -> None:
    torch.manual_seed(4)
    made = test_ties.TiedThrice()
    plan = even_plan(
        *(made, (torch.zeros(2, 3, dtype=torch.long),)),
        stages=3,
        replicas=2,
        micro_batch=2,
        micro_batches=2,
        wire_sync=Wire.BF16,
    )
    job = make_job(copy.deepcopy(made), plan, test_ties.data, loss=test_ties.loss, optimizer=momentum, epochs=2)
    states = [worker.computation.state().state_dict() for worker in run_workers(job, MemoryStorage()).values()]
    names = ("words.weight", "middle.weight", "head.weight")
    tied = [state[name] for state in states for name in names if name in state]
    assert len(tied) > 2
    assert all(torch.equal(one, tied[0]) for one in tied)
    steps = sample_numbers(plan, test_ties.SAMPLES, epochs=2)
    how: dict[str, Any] = {"loss_fn": test_ties.loss, "optimizer": momentum, "steps": steps, "replicas": 2}
    train(made, test_ties.data(), **how, rounded=torch.bfloat16)
    assert largest_difference({"": tied[0]}, {"": made.words.weight.detach()}) < 2.0**-7


def test_sums_of_64_bit_numbers_stay_exact() -> None:
    def train_doubles(wire: Wire) -> dict[str, Tensor]:
        made = model().double()
        plan = even_plan(
            *(made, (torch.zeros(2, 5).double(),)), stages=2, replicas=2, micro_batch=2, micro_batches=3, wire_sync=wire
        )
        doubles = [(x.double(), y) for x, y in vectors()]
        job = make_job(copy.deepcopy(made), plan, lambda: doubles, loss=F.cross_entropy, optimizer=momentum)
        return dict(run_workers(job, MemoryStorage())["s0.r0"].computation.state().state_dict())

    exact, rounded = train_doubles(Wire.FP32), train_doubles(Wire.BF16)
    assert all(torch.equal(rounded[name], tensor) for name, tensor in exact.items())
