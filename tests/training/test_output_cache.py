"""Outputs of micro-batches that replicas exchange: the loss and the gradients of the whole batch, or a refusal."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import DataError
from funcpipe.training.batches import Step
from funcpipe.training.output_cache import BatchLayout, OutputCache, first_dims

STEP = Step(number=0, epoch=0, micro_batches=((0, 1), (2, 3), (4,)))


class Scaled(nn.Module):
    """Outputs attract each other by how they are scaled; a loss of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: Any, target: Tensor) -> Any:
        x = output["x"] * self.scale
        return (torch.log_softmax(x @ x.T, 1) * target[:, None]).mean() * output["factor"]


def values(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and targets of the micro-batches."""
    draw = torch.Generator().manual_seed(3)
    sizes = [len(indices) for indices in STEP.micro_batches]
    return (
        [torch.randn(size, 3, generator=draw, dtype=dtype) for size in sizes],
        [torch.randn(size, generator=draw, dtype=dtype) for size in sizes],
    )


def cache_of(
    loss: Callable[[Any, Any], Any],
    own: Iterable[int],
    parts: Callable[[int], dict[str, Any]] = lambda m: {"factor": 2},
) -> OutputCache:
    """A replica that has computed the micro-batches `own`; `parts` are those of an output besides a tensor."""
    outputs, targets = values()
    cache = OutputCache(loss, None, seed=0)
    cache.begin_step(STEP, own)
    for m in own:
        cache.keep(m, {"x": outputs[m], **parts(m)}, targets[m])
    return cache


def test_replicas_compute_the_loss_of_the_batch_and_the_gradients_of_their_own_outputs() -> None:
    """Only the one with the first micro-batch adds to the gradient of the loss's own parameter."""
    outputs, targets = values()
    leaves = [output.requires_grad_() for output in outputs]
    expected = Scaled()
    whole = expected({"x": torch.cat(leaves), "factor": 2}, torch.cat(targets))
    torch.autograd.backward(whole * 4)
    losses = [Scaled(), Scaled()]
    first, other = cache_of(losses[0], (0, 2)), cache_of(losses[1], (1,))
    messages = [first.message(), other.message()]
    first.receive(messages[1])
    other.receive(messages[0])
    for cache in (first, other):
        assert cache.loss(lambda loss: 4.0) == pytest.approx(whole.item(), rel=1e-12)
    for m, cache in enumerate((first, other, first)):
        gradient, factor = cache.gradients(m)
        assert gradient is not None
        assert factor is None
        torch.testing.assert_close(gradient, leaves[m].grad)
    torch.testing.assert_close(losses[0].scale.grad, expected.scale.grad)
    assert losses[1].scale.grad is None


def test_a_loss_that_needs_no_gradient_gives_outputs_none() -> None:
    cache = cache_of(lambda output, target: output["x"].detach().sum(), (0, 1, 2))
    assert cache.loss(lambda loss: 1.0) == pytest.approx(float(torch.cat(values()[0]).sum()))
    assert [cache.gradients(m) for m in range(3)] == [[None, None]] * 3


@pytest.mark.parametrize("loss", [lambda output, target: target, lambda output, target: 1.0])
def test_a_loss_that_is_not_one_number_is_refused(loss: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(DataError, match="must return one number for the whole batch"):
        cache_of(loss, (0, 1, 2)).loss(lambda loss: 1.0)


def test_what_is_no_tensor_must_be_the_same_in_all_micro_batches_of_a_replica() -> None:
    cache = cache_of(Scaled(), (0, 1), lambda m: {"factor": m})
    with pytest.raises(
        DataError, match=r"have output\.x=tensor, output\.factor=0, .* and .* output\.factor=1, .*common"
    ):
        cache.message()


def test_what_is_no_tensor_must_be_the_same_in_all_replicas() -> None:
    one, other = cache_of(Scaled(), (0, 1)), cache_of(Scaled(), (2,), lambda m: {"factor": "2"})
    with pytest.raises(DataError, match=r"two replicas have .*output\.factor='2'.* and .*output\.factor=2"):
        one.receive(other.message())


def test_an_output_that_holds_an_object_is_refused_by_its_name() -> None:
    cache = cache_of(Scaled(), (0,), lambda m: {"thing": object()})
    with pytest.raises(DataError, match=r"output\.thing is a object, which cannot be laid side by side"):
        cache.message()


def test_micro_batches_whose_outputs_have_other_parts_are_refused() -> None:
    one = ({"x": torch.ones(2, 1)}, torch.ones(2))
    other = ({"y": torch.ones(2, 1)}, torch.ones(2))
    layout = first_dims(*one)
    output, target = layout.join([one, one], [2, 2])
    assert (output["x"].shape, target.shape) == ((4, 1), (4,))
    with pytest.raises(DataError, match=r"differ in their parts: output\.x, target and output\.y, target"):
        layout.join([one, other], [2, 2])
    with pytest.raises(DataError, match="differ in their parts"):
        BatchLayout((0,)).join([one, one], [2, 2])
