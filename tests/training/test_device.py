"""The stand-in for a device behaves as one, and so does what asks torch for it."""

import os
from unittest import mock

import pytest
import torch

from funcpipe.errors import PlatformRefused
from funcpipe.model.draws import DrawingOperators, reseed
from funcpipe.training.device import HOST, accelerator, numbers
from funcpipe.training.norms import sum_of_squares
from tests.support.stand_in import NAME, Copies, copies, on_stand_in


@on_stand_in
def test_tensors_of_host_and_device_do_not_mix() -> None:
    there, here = torch.arange(6.0, device=NAME).view(2, 3), torch.ones(3)
    with pytest.raises(RuntimeError, match="on the same device"):
        there + here
    with pytest.raises(RuntimeError, match=f"expected all tensors on {NAME}"):
        torch.nn.functional.embedding(torch.tensor([1]), there)
    assert (there + torch.tensor(1.0)).sum().item() == 21  # a number of the host
    there[1].view(-1)[1:].mul_(2)
    assert there.cpu().tolist() == [[0, 1, 2], [3, 8, 10]]


@on_stand_in
def test_every_copy_is_counted() -> None:
    before, here = copies(), torch.zeros(3)
    there = here.to(NAME)
    there.copy_(here)
    here.copy_(there)
    there[0].item()
    there[1:].cpu()
    (there + there).clone()
    assert copies() - before == Copies(to_device=2, to_device_bytes=24, to_host=3, to_host_bytes=12 + 4 + 8)


@on_stand_in
def test_numbers_are_read_at_once() -> None:
    tensors = [torch.full((2,), float(i), device=NAME) for i in range(5)]
    before = copies()
    assert sum_of_squares(tensors) == pytest.approx(60)
    assert (copies() - before).to_host == 1
    assert numbers([torch.tensor(3), torch.tensor(0.5)]) == [3, 0.5]


@on_stand_in
def test_draws_on_the_device_are_seeded_and_seen() -> None:
    reseed(7)
    first = torch.rand(3, device=NAME).cpu()
    torch.rand(3)
    reseed(7)
    with DrawingOperators() as drawing:
        assert torch.equal(torch.rand(3, device=NAME).cpu(), first)
        torch.zeros(3, device=NAME)
    assert drawing.count == 1


@on_stand_in
def test_the_accelerator_computes_deterministically() -> None:
    with mock.patch.dict(os.environ, clear=True):
        assert not accelerator().is_host
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    found = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    assert found == (False, False, False)


def test_a_function_without_an_accelerator_says_what_it_needs() -> None:
    none = mock.patch("torch.accelerator.current_accelerator", return_value=None)
    with none, pytest.raises(PlatformRefused, match="torch finds none here: the function needs a GPU, its driver"):
        accelerator()
    assert HOST.is_host
