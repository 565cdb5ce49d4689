"""Clipping by the norm of the whole gradient, and scaled losses: as in one process, whatever the plan."""

import copy
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import ScheduleKind, Wire
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.norms import GROWTH_STEPS, GradientNorm, LossScale, sum_of_squares
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.in_process import make_job, run_workers, states, train_both
from tests.training import test_ties

SHAPES = [
    (1, 1),
    (1, 3),
    (3, 2),
    (2, 1),
    (6, 1),
]


class Skipping(nn.Module):
    """Linear layers with tensors that skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (kept if i % 2 else 0.1 * x)
            kept = kept if i % 3 else x
        return x


def vectors() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, generator=generator).double(), torch.tensor(i % 5)) for i in range(29)]


def skipping() -> nn.Module:
    torch.manual_seed(2)
    return Skipping().double()


def scheduled() -> Iterator[Any]:
    """Every shape, and every schedule on two shapes at least; every schedule on every shape in the long run."""
    often = {
        *((1, 1, ScheduleKind.GPIPE), (1, 3, ScheduleKind.ONE_F_ONE_B), (2, 1, ScheduleKind.ONE_F_ONE_B)),
        *((3, 2, ScheduleKind.ONE_F_ONE_B), (3, 2, ScheduleKind.EAGER_ONE_F_ONE_B)),
        *((6, 1, ScheduleKind.GPIPE), (6, 1, ScheduleKind.EAGER_ONE_F_ONE_B)),
    }
    for shape, schedule in itertools.product(SHAPES, ScheduleKind):
        yield pytest.param(*shape, schedule, marks=[] if (*shape, schedule) in often else [pytest.mark.long])


@pytest.mark.parametrize(("stages", "replicas", "schedule"), [*scheduled()])
def test_tensors_that_skip_stages_train_as_in_one_process_under_every_schedule(
    stages: int, replicas: int, schedule: ScheduleKind
) -> None:
    sample = (torch.zeros(2, 5).double(),)
    plan = even_plan(
        skipping(), sample, stages=stages, replicas=replicas, micro_batch=2, micro_batches=4, schedule=schedule
    )
    workers, expected = train_both(skipping(), plan, vectors, loss=F.cross_entropy, optimizer=momentum)
    assert largest_difference(states(workers), expected.state_dict()) < 1e-10


def clipped() -> Iterator[Any]:
    """Every shape, norm and schedule, and every two of them on several stages; all three in the long run."""
    gpipe, one_f_one_b = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B
    often = {
        *((1, 1, 1.5, gpipe), (1, 3, 0.01, one_f_one_b), (2, 1, 0.01, gpipe)),
        *((3, 2, 1.5, one_f_one_b), (3, 2, 1e6, gpipe)),
        *((6, 1, 1.5, gpipe), (6, 1, 0.01, one_f_one_b)),
    }
    for shape, clip, schedule in itertools.product(SHAPES, (0.01, 1.5, 1e6), (gpipe, one_f_one_b)):
        yield pytest.param(
            *shape, clip, schedule, marks=[] if (*shape, clip, schedule) in often else [pytest.mark.long]
        )


@pytest.mark.parametrize(("stages", "replicas", "clip", "schedule"), [*clipped()])
def test_gradients_are_clipped_as_in_one_process_and_tied_ones_count_once(
    stages: int, replicas: int, clip: float, schedule: ScheduleKind
) -> None:
    ids = (torch.zeros(2, 3, dtype=torch.long),)
    model, data, loss = test_ties.model(), test_ties.data, test_ties.loss
    plan = even_plan(model, ids, stages=stages, replicas=replicas, micro_batch=2, micro_batches=2, schedule=schedule)
    workers, expected = train_both(model, plan, data, loss=loss, optimizer=momentum, clip_grad_norm=clip)
    assert largest_difference(states(workers), expected.state_dict()) < 1e-10


class Tiny(nn.Module):
    """Its gradients at the first cut are some 1e-9: nothing in half precision, unless the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1.0
        output: Tensor = self.second(x * 1e-6)
        return output


def floats() -> list[tuple[Tensor, Tensor]]:
    return [(x.float(), y) for x, y in vectors()]


def trained_tiny(**wires: Wire | None) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(2)
    model = Tiny()
    sample = (torch.zeros(2, 5),)
    plan = even_plan(model, sample, stages=2, replicas=2, micro_batch=2, micro_batches=2, **wires)  # type: ignore[arg-type]
    job = make_job(model, plan, floats, loss=F.cross_entropy, optimizer=momentum, epochs=1)
    return model, states(run_workers(job, MemoryStorage()))


def test_small_gradients_survive_half_precision_and_the_loss_scale_leaves_no_trace() -> None:
    before, exact = trained_tiny(wire=Wire.FP32)
    _, half = trained_tiny(wire=Wire.FP32, wire_back=Wire.FP16)
    start = before.state_dict()["first.weight"]
    moved = exact["first.weight"] - start
    assert moved.abs().max() > 0
    assert torch.allclose(half["first.weight"] - start, moved, rtol=0.02, atol=float(moved.abs().max()) / 100)


class Steep(Tiny):
    """Its scaled gradients are too large for half precision at first."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x)) * 30.0
        return output


def test_an_overflow_leaves_the_step_out_in_all_stages_and_replicas_and_halves_the_scale() -> None:
    """The first two steps of eight overflow, so that a single process that passes over them ends with the same."""
    slow = partial(torch.optim.SGD, lr=1e-4)
    torch.manual_seed(2)
    model = Steep()
    sample = (torch.zeros(2, 5),)
    plan = even_plan(model, sample, stages=2, replicas=2, micro_batch=2, micro_batches=2, wire_back=Wire.FP16)
    workers = run_workers(
        make_job(model, plan, floats, loss=F.cross_entropy, optimizer=slow, epochs=2), MemoryStorage()
    )
    assert {worker.computation.norm.loss_scale for worker in workers.values()} == {LossScale(2.0**14, good_steps=6)}
    steps = sample_numbers(plan, 29, epochs=2)[2:]
    expected = copy.deepcopy(model)
    train(expected, floats(), loss_fn=F.cross_entropy, optimizer=slow, steps=steps)
    found = states(workers)
    for name, start in model.state_dict().items():
        moved = expected.state_dict()[name] - start
        assert torch.allclose(found[name] - start, moved, rtol=0, atol=float(moved.abs().max()) / 100)


def test_the_scale_follows_the_rule_of_gradscaler() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_STEPS)
    ours = LossScale()
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(torch.zeros(1))
    for step in range(2 * GROWTH_STEPS + 3):
        finite = step not in (1, 2, GROWTH_STEPS + 1)
        parameter.grad = torch.full((1,), 1.0 if finite else math.inf)
        scaler.step(optimizer)
        scaler.update()
        ours = ours.after(finite=finite)
        assert ours.factor == scaler.get_scale()


def test_without_a_loss_scale_a_norm_that_is_no_number_is_not_hidden() -> None:
    norm = GradientNorm(clip_grad_norm=1.0)
    norm.add_stage(0, math.inf)
    factor = norm.finish_step()
    assert factor is not None
    assert math.isnan(factor)


def test_a_norm_too_large_for_a_float_is_infinite() -> None:
    huge = torch.full((2,), 1e154, dtype=torch.float64)
    assert sum_of_squares([huge, huge, huge, huge]) == float("inf")
