"""The stand-in for a device behaves as one, and so does what asks torch for it."""

import functools
import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from funcpipe.core import MB
from funcpipe.errors import PlatformRefused
from funcpipe.model.draws import DrawingOperators, reseed
from funcpipe.model.graph import trace
from funcpipe.model.split import StageModule, split
from funcpipe.training.device import HOST, Device, accelerator, numbers
from funcpipe.training.norms import sum_of_squares
from tests.support.in_turn import even_bounds
from tests.support.stand_in import on_stand_in
from tests.support.stand_in_device import NAME, RANDOM, Copies, copies


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


def test_what_draws_nothing_leaves_the_generator_to_other_threads() -> None:
    """They hold it while they seed and draw; attention without dropout holds nothing."""
    with RANDOM.in_use(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default):
        RANDOM.seed(5)
    assert torch.equal(RANDOM.state, torch.Generator().manual_seed(5).get_state())


@on_stand_in
def test_the_accelerator_computes_deterministically() -> None:
    with mock.patch.dict(os.environ, clear=True):
        assert not accelerator(16_000).is_host
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    found = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    assert found == (False, False, False)


def test_a_function_without_an_accelerator_says_what_it_needs() -> None:
    none = mock.patch("torch.accelerator.current_accelerator", return_value=None)
    with none, pytest.raises(PlatformRefused, match="torch finds none here: the function needs a GPU, its driver"):
        accelerator(16_000)
    assert HOST.is_host


@on_stand_in
def test_a_function_takes_no_more_of_the_device_than_its_size_has() -> None:
    module = torch.get_device_module(NAME)
    held = module.memory_allocated()
    try:
        accelerator(512 + 100)  # which is what the driver takes, and what is left for tensors
        kept = torch.empty(90 * MB - held, dtype=torch.uint8, device=NAME)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10 * MB + 1, dtype=torch.uint8, device=NAME)
        assert torch.empty(10 * MB, dtype=torch.uint8, device=NAME).nbytes + kept.nbytes + held == 100 * MB
        del kept
        assert module.memory_allocated() == held
    finally:
        accelerator(1_000_000)  # more than there is: all of it
    assert torch.empty(200 * MB, dtype=torch.uint8, device=NAME).nbytes == 200 * MB


META = Device(torch.device("meta"))


def test_all_tensors_inside_what_a_stage_is_given_go_to_its_device() -> None:
    value: Any = {"x": torch.ones(2, 3), "more": [7, (torch.zeros(4), "text")]}
    found = META.given(value)
    assert found["x"].device.type == found["more"][1][0].device.type == "meta"
    assert (found["x"].shape, found["more"][0], found["more"][1][1]) == ((2, 3), 7, "text")
    assert value["x"].device.type == "cpu"
    assert META.to_device({"x": torch.ones(5)})["x"].device.type == META.empty(3, torch.float64).device.type == "meta"


def test_what_is_on_the_host_already_is_not_copied() -> None:
    value = {"x": torch.ones(2)}
    assert HOST.given(value) is value
    assert HOST.read(value) is value
    assert META.read(value)["x"] is value["x"]


class Placing(nn.Module):
    """Makes tensors where its input is, and has a frozen weight and a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.first.weight.requires_grad_(False)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        made = torch.arange(3, device=x.device) + torch.zeros(3, device="cpu").to(x.device)
        return self.last(self.first(x) + made + self.offset)


class Scaled(nn.Module):
    """A loss with a parameter and a buffer."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weights", torch.ones(2))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        return nn.functional.cross_entropy(output * self.scale, target, weight=self.weights)


def placed() -> StageModule:
    graph = trace(Placing(), (torch.zeros(2, 3),))
    (stage,) = split(graph, even_bounds(graph, 1))
    return stage


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_tensors_that_a_loss_function_is_bound_to_are_moved() -> None:
    weights = torch.ones(2)
    META.move(loss=functools.partial(nn.functional.cross_entropy, weight=weights))
    assert weights.device.type == "meta"


def test_on_the_host_nothing_is_moved() -> None:
    stage = placed()
    program = stage.program
    HOST.move(stage, loss=Scaled())
    assert stage.program is program
    assert {tensor.device.type for tensor in tensors_of(stage).values()} == {"cpu"}


def test_the_accelerator_is_the_one_that_torch_has_chosen_and_computes_deterministically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[None] = []
    module = mock.Mock(**{"mem_get_info.return_value": (0, 1024 * MB)})
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("meta"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("funcpipe.training.device.compute_deterministically", lambda: calls.append(None))
    monkeypatch.setattr("torch.get_device_module", lambda kind: module)
    found = accelerator(512 + 256)
    module.set_per_process_memory_fraction.assert_called_once_with(0.25)
    assert found.empty(2, torch.float32).device.type == "meta"
    assert len(calls) == 1
