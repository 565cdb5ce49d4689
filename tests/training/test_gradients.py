import functools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from funcpipe.core import Wire
from funcpipe.errors import PlanError
from funcpipe.training.gradients import FlatGradient
from tests.support.waiting import LONG_S


def summed(replicas: int, gradients: list[list[Tensor | None]], extras: list[list[Tensor]]) -> list[list[nn.Parameter]]:
    """Parameters of every replica after the sum of the vectors took the place of each."""
    parameters = []
    flats = []
    for own, own_extras in zip(gradients, extras, strict=True):
        made = [nn.Parameter(torch.zeros(3, 2)) for _ in own]
        parameters.append(made)
        flats.append(FlatGradient(made, own_extras))
        for parameter, gradient in zip(made, own, strict=True):
            parameter.grad = gradient
        flats[-1].complete(own_extras)
    total = functools.reduce(torch.add, [flat.vector for flat in flats])
    for flat in flats:
        flat.vector.copy_(total)
        flat.unpack_gradients()
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


def test_a_gradient_of_zeros_is_a_gradient_whatever_their_signs() -> None:
    zeros = torch.tensor([[-0.0, 0.0], [-0.0, -0.0], [0.0, -0.0]])
    for (parameter,) in summed(2, [[zeros], [zeros.clone()]], [[], []]) + summed(
        2, [[zeros.clone()], [None]], [[], []]
    ):
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_extras_are_summed_and_precision_is_the_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    flat = FlatGradient([parameter], [torch.zeros(1, 1), torch.zeros(0)])
    parameter.grad = torch.tensor([1e-17, 1.0], dtype=torch.float64)
    flat.complete([torch.tensor([[2.0]]), torch.zeros(0)])
    extras = flat.unpack_gradients()
    assert [extra.tolist() for extra in extras] == [[[2.0]], []]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([1e-17, 1.0], abs=0)


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))


def test_gradients_are_complete_from_the_end_while_the_backward_goes_on() -> None:
    """The last layer's gradient is there when the first one's is not even begun."""
    model, expected = layers(3), layers(3)
    x = torch.randn(2, 4)
    expected(x).sum().backward()
    whole = torch.cat([p.grad.reshape(-1) for p in expected.parameters()])  # type: ignore[union-attr]
    go_on = threading.Event()

    def stop(gradient: Tensor) -> None:
        assert go_on.wait(LONG_S)

    hidden = model[1](model[0](x))
    hidden.register_hook(stop)
    loss = model[2](hidden).sum()
    flat = FlatGradient(list(model.parameters()), [torch.zeros(2)])
    flat.start_last_backward(loss.backward)
    start = flat.layout.head + 2 * 16
    flat.wait_for(start, start + 16)
    assert torch.equal(flat.vector[start:], whole[-16:])
    assert not flat.vector[flat.layout.head : start].any()
    go_on.set()
    flat.wait_for(flat.layout.head, start)
    assert flat.finish_last_backward()
    flat.complete([torch.tensor([5.0, 6.0])])
    assert flat.vector.tolist()[: flat.layout.head] == [5, 6]
    assert torch.equal(flat.vector[flat.layout.head :], whole)
    assert all(p.grad is None for p in model.parameters())


def test_what_earlier_micro_batches_added_and_the_last_one_lacks_is_taken_at_the_end() -> None:
    model = layers(2)
    flat = FlatGradient(list(model.parameters()), [])
    model[1].weight.grad = torch.ones(4, 4)
    flat.start_last_backward(model[0](torch.ones(1, 4)).sum().backward)
    flat.wait_for(flat.layout.head + 16, flat.layout.head + 32)
    assert torch.equal(flat.vector[flat.layout.head + 16 :], torch.ones(16))


def test_an_error_of_the_backward_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("no")

    flat = FlatGradient(list(layers(1).parameters()), [])
    flat.start_last_backward(fail)
    with pytest.raises(ValueError, match="no"):
        flat.wait_for(flat.layout.head, flat.layout.head + 16)
    with pytest.raises(ValueError, match="no"):
        flat.finish_last_backward()


def test_a_gradient_that_comes_in_two_parts_is_refused() -> None:
    """As by reentrant checkpoints: the first part may have been sent when the second comes."""
    model = layers(1)

    def twice() -> None:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()

    flat = FlatGradient(list(model.parameters()), [])
    flat.start_last_backward(twice)
    with pytest.raises(PlanError, match="use_reentrant=False"):
        flat.finish_last_backward()


@given(st.lists(st.lists(st.sampled_from([None, -0.0, 0.0, 1e-45, 3.0, -7.5]), max_size=4), min_size=1, max_size=3))
def test_gradients_are_made_in_the_vector_as_autograd_adds_them_up_elsewhere(
    added: list[list[float | None]],
) -> None:
    """Step by step, with backwards that reach the parameter or do not."""
    parameter, plain, other = (nn.Parameter(torch.ones(5)) for _ in range(3))
    flat = FlatGradient([other, parameter], [])
    for gradients in added:
        flat.begin_step()
        plain.grad = None
        for value in gradients:
            for one in (parameter, plain):
                if value is not None:
                    torch.autograd.backward([one], [torch.full((5,), value)])
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == flat.vector.untyped_storage().data_ptr()
        flat.complete([])
        assert parameter.grad is None
        flat.unpack_gradients()
        assert other.grad is None
        if plain.grad is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, plain.grad)


def test_what_16_bits_would_lose_becomes_zero_but_not_no_gradient() -> None:
    """A negative number too small for bf16 would become -0.0, which says that there is no gradient."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    flat = FlatGradient(parameters, [], Wire.BF16)
    parameters[0].grad = torch.tensor([-1e-42, 1e-42])
    parameters[1].grad = None
    flat.complete([])
    flat.vector.copy_(flat.vector.to(torch.bfloat16))
    flat.unpack_gradients()
    assert torch.equal(parameters[0].grad, torch.zeros(2))
    assert parameters[1].grad is None


def test_gradients_of_another_dtype_or_replaced_by_somebody_are_copied() -> None:
    half, single = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2))
    flat = FlatGradient([half, single], [])
    for _ in range(2):
        torch.autograd.backward(half.sum() * 2 + single.sum())
    assert single.grad is not None
    single.grad = single.grad * 5
    flat.complete([])
    assert flat.vector.tolist() == [4, 4, 4, 10, 10]


def test_a_step_begins_when_the_backward_of_one_that_was_given_up_has_ended() -> None:
    model, go_on = layers(1), threading.Event()

    def late() -> None:
        assert go_on.wait(LONG_S)
        model(torch.ones(1, 4)).sum().backward()

    flat = FlatGradient(list(model.parameters()), [])
    flat.start_last_backward(late)
    threading.Timer(0.05, go_on.set).start()
    flat.begin_step()
    assert go_on.is_set()
    assert not flat.vector.any()
    assert not flat.finish_last_backward()
