import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from funcpipe.gradients import FlatGradient


def summed(replicas: int, gradients: list[list[Tensor | None]], extras: list[list[Tensor]]) -> list[list[nn.Parameter]]:
    """Parameters of every replica after the sum of the vectors took the place of each."""
    parameters = []
    flats = []
    for own, own_extras in zip(gradients, extras, strict=True):
        made = [nn.Parameter(torch.zeros(3, 2)) for _ in own]
        for parameter, gradient in zip(made, own, strict=True):
            parameter.grad = gradient
        parameters.append(made)
        flats.append(FlatGradient(made, own_extras))
    total = torch.stack([flat.vector for flat in flats]).sum(0)
    for flat in flats:
        flat.vector.copy_(total)
        flat.unpack()
    return parameters


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32), st.data())
def test_every_replica_ends_with_the_same_bits_of_the_sum(
    replicas: int, count: int, seed: int, data: st.DataObject
) -> None:
    """The sum holds every replica's own gradient; a parameter without one anywhere keeps none, and shifts nothing."""
    generator = torch.Generator().manual_seed(seed)
    present = data.draw(
        st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=replicas, max_size=replicas)
    )
    gradients = [[torch.randn(3, 2, generator=generator) if there else None for there in row] for row in present]
    extras = [[torch.randn(4, generator=generator)] for _ in range(replicas)]
    found = summed(replicas, gradients, extras)
    for k in range(count):
        column = [row[k] for row in gradients]
        values = [gradient for gradient in column if gradient is not None]
        for replica in found:
            if values:
                torch.testing.assert_close(replica[k].grad, torch.stack(values).sum(0))
                assert torch.equal(replica[k].grad, found[0][k].grad)  # type: ignore[arg-type]
            else:
                assert replica[k].grad is None


def test_extras_are_summed_and_precision_is_the_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([1e-17, 1.0], dtype=torch.float64)
    flat = FlatGradient([parameter], [torch.tensor([[2.0]]), torch.zeros(0)])
    extras = flat.unpack()
    assert [extra.tolist() for extra in extras] == [[[2.0]], []]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([1e-17, 1.0], abs=0)
