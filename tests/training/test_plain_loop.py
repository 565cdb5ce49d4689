"""The loop in one process leaves what loops of torch leave that are written out here, on whole batches or in parts."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

from funcpipe.core import Coupled, Interval, OnNan, Reduction
from funcpipe.errors import DataError
from funcpipe.model.graph import trace
from funcpipe.training.batches import Step
from funcpipe.training.plain import PlainRun, PlainTraining
from funcpipe.training.recipe import Recipe
from tests.support.in_turn import InTurn, even_bounds
from tests.training.learning import MOMENTUM, Samples, all_steps, data, difference, network, on_whole_batches

STEPS = all_steps()


class Idle(nn.Module):
    """The network beside a parameter that its forward does not use, which never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def plain_of(model: nn.Module, samples: Samples, *, loss: Any, whole: bool = False, **recipe: Any) -> PlainTraining:
    return PlainTraining(
        model=model,
        graph=trace(model, (torch.stack([x for x, _ in samples[:2]]),)),
        dataset=samples,
        steps=STEPS,
        recipe=Recipe(loss=loss, optimizer=MOMENTUM, **recipe),
        seed=0,
        whole=whole,
    )


def assert_trained_as(found: PlainRun, expected: nn.Module) -> None:
    assert difference(found.end, expected.state_dict()) < 1e-12
    assert difference(found.end, found.start) > 1e-3


def poisoned() -> tuple[Samples, int]:
    """Samples, one of which is no number, and its place; it is not in the first step."""
    samples, place = data(), STEPS[1].micro_batches[1][0]
    samples[place][0][2] = math.nan
    return samples, place


def holding(place: int) -> Callable[[Step], bool]:
    return lambda step: any(place in indices for indices in step.micro_batches)


@pytest.mark.parametrize("interval", Interval)
def test_on_whole_batches_a_schedule_steps_when_it_is_due(interval: Interval) -> None:
    schedule, by_step = partial(lr.StepLR, step_size=2, gamma=0.3), interval is Interval.STEP
    expected = on_whole_batches(network(), data(), F.cross_entropy, schedule=schedule, by_step=by_step)
    plain = plain_of(
        network(), data(), loss=F.cross_entropy, whole=True, scheduler=schedule, scheduler_interval=interval
    )
    assert_trained_as(plain.run(), expected)


def test_on_whole_batches_a_schedule_that_waits_for_validations_leaves_the_rate_alone() -> None:
    plain = plain_of(network(), data(), loss=F.cross_entropy, whole=True, scheduler=lr.ReduceLROnPlateau)
    assert_trained_as(plain.run(), on_whole_batches(network(), data(), F.cross_entropy))


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_that_is_not_finite_is_left_out_but_counts_for_the_schedule(whole: bool) -> None:
    samples, place = poisoned()
    schedule = partial(lr.ExponentialLR, gamma=0.8)
    expected = on_whole_batches(network(), samples, F.cross_entropy, schedule=schedule, skips=holding(place))
    recipe: dict[str, Any] = {"scheduler": schedule, "scheduler_interval": Interval.STEP, "on_nan": OnNan.SKIP}
    found = plain_of(network(), samples, loss=F.cross_entropy, whole=whole, **recipe).run()
    assert_trained_as(found, expected)


def with_ignored_targets() -> Samples:
    """All targets of one micro-batch of the first step are ignored, and every seventh elsewhere."""
    samples = data()
    for place in {*STEPS[0].micro_batches[1], *range(0, len(samples), 7)}:
        samples[place] = (samples[place][0], torch.tensor(-100))
    return samples


def test_the_mean_over_tokens_is_that_of_the_whole_batch_also_where_a_part_has_none() -> None:
    samples = with_ignored_targets()
    expected = on_whole_batches(Idle(), samples, F.cross_entropy)
    assert_trained_as(plain_of(Idle(), samples, loss=F.cross_entropy, reduction=Reduction.TOKENS).run(), expected)


def test_the_mean_over_tokens_is_that_of_a_loss_that_weighs_classes_and_ignores_one() -> None:
    loss = partial(F.cross_entropy, ignore_index=3, weight=torch.tensor([0.5, 1.0, 3.0, 7.0], dtype=torch.float64))
    plain = plain_of(network(), data(), loss=loss, reduction=Reduction.TOKENS)
    assert_trained_as(plain.run(), on_whole_batches(network(), data(), loss))


def summed_with_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Class 0 weighs nothing, the others more and more."""
    weights = target.double()
    return (F.cross_entropy(output, target, reduction="none") * weights).sum(), weights.sum()


@pytest.mark.parametrize("whole", [True, False])
def test_a_weighted_loss_is_divided_by_the_weight_of_the_whole_batch(whole: bool) -> None:
    weights = torch.arange(4.0, dtype=torch.float64)
    expected = on_whole_batches(network(), data(), partial(F.cross_entropy, weight=weights))
    plain = plain_of(network(), data(), loss=summed_with_weight, whole=whole, reduction=Reduction.WEIGHTED)
    assert_trained_as(plain.run(), expected)


def test_weighted_losses_that_are_not_finite_leave_out_their_step() -> None:
    samples, place = poisoned()
    expected = on_whole_batches(network(), samples, F.cross_entropy, skips=holding(place))
    recipe: dict[str, Any] = {"reduction": Reduction.TOKENS, "on_nan": OnNan.SKIP}
    assert_trained_as(plain_of(network(), samples, loss=F.cross_entropy, **recipe).run(), expected)


class Seen(nn.Module):
    """The network, which counts the samples that it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        self.seen += len(x)
        return self.inner(x)


def test_a_step_in_which_all_targets_are_ignored_leaves_nothing_behind() -> None:
    samples = data()
    for place in (place for indices in STEPS[0].micro_batches for place in indices):
        samples[place] = (samples[place][0], torch.tensor(-100))
    recipe: dict[str, Any] = {"reduction": Reduction.TOKENS, "on_nan": OnNan.SKIP}
    found = plain_of(Seen(), samples, loss=F.cross_entropy, **recipe).run()
    assert found.end["seen"] == sum(step.samples for step in STEPS if step.number != STEPS[0].number)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Outputs of one class attract each other, all others of the batch repel; from a small batch nothing is learned."""
    pairs = (target[:, None] == target) & ~torch.eye(len(target), dtype=torch.bool)
    if len(target) < 8:
        return torch.zeros((), dtype=torch.float64)
    like = F.normalize(output, dim=1) @ F.normalize(output, dim=1).T
    return -torch.log_softmax(like, 1)[pairs].mean()


def test_a_coupled_loss_is_that_of_the_whole_batch_also_where_it_needs_no_gradient() -> None:
    """The last step of an epoch is too small for the loss; nothing is learned from it."""
    assert {step.samples for step in STEPS} == {4, 8}
    expected = on_whole_batches(network(), data(), contrastive)
    assert_trained_as(plain_of(network(), data(), loss=contrastive, coupled=Coupled.CACHE).run(), expected)


def test_a_coupled_loss_that_is_not_finite_leaves_out_its_step() -> None:
    samples, place = poisoned()
    expected = on_whole_batches(network(), samples, contrastive, skips=holding(place))
    recipe: dict[str, Any] = {"coupled": Coupled.CACHE, "on_nan": OnNan.SKIP}
    assert_trained_as(plain_of(network(), samples, loss=contrastive, **recipe).run(), expected)


def test_a_coupled_loss_that_overflows_leaves_out_its_step_though_its_gradients_are_finite() -> None:
    """A script sees the same if it looks at the loss."""
    large = STEPS[1].micro_batches[1][0]
    samples = data()
    samples[large] = (samples[large][0], torch.tensor(9))

    def offset(output: Tensor, target: Tensor) -> Tensor:
        infinite = torch.where(target == 9, math.inf, 0.0).sum()
        return F.cross_entropy(output, target % 4) + infinite

    expected = on_whole_batches(network(), samples, offset, skips=holding(large))
    recipe: dict[str, Any] = {"coupled": Coupled.CACHE, "on_nan": OnNan.SKIP}
    assert_trained_as(plain_of(network(), samples, loss=offset, **recipe).run(), expected)


def with_hooks(hook: Callable[[Tensor], Tensor | None]) -> nn.Module:
    model = Idle()
    for name in ("inner.0.weight", "inner.3.bias", "unused"):
        model.get_parameter(name).register_hook(hook)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("whole", [True, False])
def test_hooks_of_parameters_see_the_gradient_of_the_whole_batch(whole: bool) -> None:
    """One that clamps does something else to the gradients of micro-batches; one without a gradient is not called."""
    seen: list[tuple[int, ...]] = []

    def clamped(gradient: Tensor) -> Tensor:
        seen.append(tuple(gradient.shape))
        return gradient.clamp(-0.01, 0.01)

    expected = on_whole_batches(with_hooks(lambda gradient: gradient.clamp(-0.01, 0.01)), data(), F.cross_entropy)
    assert_trained_as(plain_of(with_hooks(clamped), data(), loss=F.cross_entropy, whole=whole).run(), expected)
    assert {shape: seen.count(shape) for shape in seen} == {(8, 6): len(STEPS), (8,): len(STEPS)}


def test_hooks_that_return_nothing_leave_gradients_as_they_are() -> None:
    found = plain_of(with_hooks(lambda gradient: None), data(), loss=F.cross_entropy).run()
    assert_trained_as(found, on_whole_batches(Idle(), data(), F.cross_entropy))


class PartsTwice(nn.Module):
    """Calls a layer of attention, which drops out, and a part of that by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=8, dropout=0.4, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        mixed = self.layer(x[:, None] * torch.ones(3, 1, dtype=x.dtype)).mean(1)
        return self.head(torch.tanh(self.layer.linear1(mixed)))


def test_a_module_that_is_called_inside_another_and_by_itself_draws_as_in_stages() -> None:
    torch.manual_seed(4)
    plain = plain_of(PartsTwice().double(), data(), loss=F.cross_entropy)
    assert {node.target for node in plain.graph.module.graph.nodes} >= {"layer", "layer.linear1"}
    found, expected = InTurn(plain, even_bounds(plain.graph, 1), 1).train(), plain.run()
    assert difference(found, expected.end) < 1e-12
    assert difference(expected.end, expected.start) > 1e-3


def test_weights_of_every_kind_are_moved_by_a_share_of_themselves() -> None:
    """Complex ones by a share of the whole number, so that its real and imaginary parts go together."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Linear(6, 4).double()
            self.turned = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x: Tensor) -> Any:
            return (self.real(x) * self.turned).abs()

    torch.manual_seed(1)
    plain = plain_of(Complex(), data(), loss=F.cross_entropy)
    moved = replace(plain, steps=(), rounding=1e-6)
    start, first, second = (moved.run(number).start for number in (0, 1, 2))
    for name, values in start.items():
        shares = [(other[name] - values) / values for other in (first, second)]
        assert all(torch.allclose(share.abs(), torch.full_like(share.abs(), 1e-6), rtol=1e-6) for share in shares)
        assert not torch.allclose(shares[0], shares[1], rtol=0.1, atol=0.0)


def test_gradients_are_kept_by_name_and_those_that_are_not_there_are_left_out() -> None:
    found = plain_of(Idle(), data(), loss=F.cross_entropy).run(names=("unused", "inner.6.bias"))
    assert [set(gradients) for gradients in found.gradients] == [{"inner.6.bias"}] * len(STEPS)
    assert found.end.keys() == {"unused", "inner.6.bias"}


def test_stages_refuse_a_loss_of_several_numbers() -> None:
    plain = plain_of(network(), data(), loss=partial(F.cross_entropy, reduction="none"))
    with pytest.raises(DataError, match="must return one number, the mean over the samples"):
        InTurn(plain, even_bounds(plain.graph, 1), 1).train()
