"""A step that is skipped leaves nothing behind: neither in BatchNorm's statistics, nor in what forwards carry."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import OnNan
from funcpipe.errors import NotFinite
from funcpipe.model.graph import trace
from funcpipe.training.batches import Batches
from funcpipe.training.norms import Finiteness, GradientNorm, LossScale, is_finite
from funcpipe.training.plain import PlainTraining
from funcpipe.training.recipe import Recipe
from tests.support.in_turn import InTurn, even_bounds


class Remembers(nn.Module):
    """Adds up what it has seen, in a buffer, and counts its calls."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen = self.seen + x.detach().sum(0)
        return x + 0.01 * self.seen.tanh() / self.calls


def model(*, remembers: bool) -> nn.Module:
    torch.manual_seed(0)
    inner = Remembers() if remembers else nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(4, 8), inner, nn.Tanh(), nn.Linear(8, 3))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    samples = [(torch.randn(4, generator=draw), torch.tensor(i % 3)) for i in range(24)]
    samples[7][0][1] = math.nan
    return samples


def plain_training(made: nn.Module) -> PlainTraining:
    return PlainTraining(
        model=made,
        graph=trace(made, (torch.randn(4, 4),)),
        dataset=data(),
        steps=tuple(Batches(samples=24, global_batch=8, micro_batch=4, seed=0, shuffle=False).epoch(0)),
        recipe=Recipe(loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), on_nan=OnNan.SKIP),
        seed=0,
    )


@pytest.mark.parametrize(("remembers", "replicas"), [(False, 1), (False, 2), (True, 1)])
def test_a_skipped_step_leaves_nothing_behind(remembers: bool, replicas: int) -> None:
    plain = plain_training(model(remembers=remembers))
    expected = plain.run(0)
    turns = InTurn(plain, even_bounds(plain.graph, 2), replicas)
    found = turns.train()
    for name, tensor in expected.end.items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(tensor, expected.start[name]) for name, tensor in expected.end.items())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_is_enough_and_sums_that_overflow_are_no_reason(bad: float) -> None:
    tensor = torch.full((1000,), 3e38)
    assert is_finite(tensor)
    tensor[400] = bad
    assert not is_finite(tensor)
    assert is_finite(torch.arange(3))
    assert not is_finite(torch.tensor([complex(0, bad)]))


def test_a_gradient_that_no_scale_makes_finite_ends_the_run_unless_steps_are_to_be_skipped() -> None:
    def overflow(norm: GradientNorm) -> None:
        for _ in range(40):
            norm.add_stage(0, math.inf)
            assert norm.finish_step() is None
            assert norm.skipped

    overflow(GradientNorm(loss_scale=LossScale(), on_nan=OnNan.SKIP))
    with pytest.raises(NotFinite, match="not finite even with a loss scale of 6e-05"):
        overflow(GradientNorm(loss_scale=LossScale(), on_nan=OnNan.STOP))
    skips = GradientNorm(on_nan=OnNan.SKIP)
    assert skips.is_needed
    skips.add_stage(0, 4.0)
    assert skips.finish_step() == 1.0
    assert not skips.skipped
    assert not GradientNorm(on_nan=OnNan.STOP).is_needed


def watching(on_nan: OnNan = OnNan.STOP) -> tuple[Finiteness, nn.Parameter]:
    weight = nn.Parameter(torch.zeros(2))
    return Finiteness(on_nan, 1, {"weight": weight}), weight


def test_a_loss_that_is_not_finite_is_that_of_a_micro_batch_or_of_the_batch() -> None:
    watch, _ = watching()
    watch.check_loss(1.0, 2)
    with pytest.raises(NotFinite, match=r"^in step 3 the loss is inf, first of micro-batch 4$"):
        watch.check_loss(math.inf, 2, 4)
    with pytest.raises(NotFinite, match=r"^in step 3 the loss of the batch is nan$"):
        watch.check_loss(math.nan, 2)
    watching(OnNan.IGNORE)[0].check_loss(math.nan, 2)


def test_gradients_that_are_not_finite_end_the_run_with_the_stage_where_that_began() -> None:
    watch, weight = watching()
    norm = GradientNorm(clip_grad_norm=1.0, on_nan=OnNan.STOP)
    weight.grad = torch.ones(2)
    for stage, squares in enumerate((math.inf, 1.0, math.nan)):
        norm.add_stage(stage, squares)
    with pytest.raises(NotFinite, match=r"^in step 5 the gradient of stage 2 is not finite$"):
        watch.check_gradients(norm, 4)
    weight.grad[1] = math.nan
    with pytest.raises(NotFinite, match=r"^in step 5 the gradient of weight in stage 1 is not finite, begun there"):
        watch.check_gradients(norm, 4)


def test_a_replica_that_updates_a_part_checks_that_part() -> None:
    watch, _ = watching()
    watch.check_split(torch.ones(3), 0)
    bad = torch.tensor([0.0, -math.inf])
    with pytest.raises(NotFinite, match=r"^in step 1 the gradient of stage 1 is not finite$"):
        watch.check_split(bad, 0)
    watching(OnNan.SKIP)[0].check_split(bad, 0)
