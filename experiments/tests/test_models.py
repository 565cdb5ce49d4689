"""The experiments' models: parameter counts as published, layer graphs that trace, data that stays."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.models import amoebanet, bert, characters, digits, resnet

PLANNED = ("amoebanet", "bert", "resnet")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"experiments.models.{name}")


@functools.cache
def on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


@pytest.mark.parametrize(
    ("factory", "parameters"),
    [
        (resnet.model, 44_549_160),
        (amoebanet.model, 122_470_120),
        (amoebanet.model_36, 236_194_024),
        (bert.model, 302_328_834),
        (digits.model, 299_114),
        (characters.model, 824_672),
    ],
)
def test_parameters_are_as_stated(factory: Callable[[], nn.Module], parameters: int) -> None:
    assert sum(p.numel() for p in on_meta(factory).parameters() if p.requires_grad) == parameters


@pytest.mark.parametrize(("factory", "layers"), [(amoebanet.model, 24), (amoebanet.model_36, 42), (bert.model, 26)])
def test_trainable_layers_are_as_stated(factory: Callable[[], nn.Module], layers: int) -> None:
    parts = [part for child in on_meta(factory).children() for part in unfold(child)]
    assert sum(any(p.requires_grad for p in part.parameters()) for part in parts) == layers


def unfold(child: nn.Module) -> list[nn.Module]:
    """The cells or blocks of a list of them; a stem, a classifier or an embedding is one layer."""
    if isinstance(child, nn.ModuleList | nn.Sequential) and isinstance(child[0], amoebanet.Cell | bert.Block):
        return list(child)
    return [child]


@pytest.mark.parametrize("name", PLANNED)
def test_the_loss_takes_sample_and_target(name: str) -> None:
    inputs = [tensor.to("meta") for tensor in module(name).sample()]
    assert module(name).loss(on_meta(module(name).model)(*inputs), module(name).target().to("meta")).shape == ()


IMAGES = (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: amoebanet.AmoebaNet(normal_cells=3, filters=16, classes=5), IMAGES),
        (lambda: bert.BertEncoder(layers=2, width=32, heads=4, sequence=8), (torch.randn(2, 8, 32),)),
        (lambda: resnet.ResNet(blocks=(1, 2, 1, 1), width=8, classes=5), IMAGES),
        (digits.model, tuple(tensor[:2] for tensor in digits.sample())),
        (characters.model, tuple(tensor[:2] for tensor in characters.sample())),
    ],
    ids=[*PLANNED, "digits", "characters"],
)
def test_a_small_one_trains_and_traces(build: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    model = build()
    model(*inputs).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(*inputs), model(*inputs), rtol=0, atol=0)


def test_an_amoebanet_cell_reads_the_two_before_it() -> None:
    nodes = torch.fx.symbolic_trace(on_meta(amoebanet.model)).graph.nodes
    readers = [len(node.users) for node in nodes if node.target is torch.cat]
    assert readers.count(2) == 22 - 2  # of 22 cells, the last two have one reader each


@pytest.mark.parametrize("name", ["digits", "characters"])
def test_data_is_the_same_each_time_and_train_is_not_test(name: str) -> None:
    first, again, held_out = module(name).train_data(), module(name).train_data(), module(name).test_data()
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, again.tensors, strict=True))
    seen = {row.numpy().tobytes() for row in first.tensors[0]}
    assert sum(row.numpy().tobytes() in seen for row in held_out.tensors[0]) <= len(held_out) // 100


def test_digits_are_split_with_all_classes_alike() -> None:
    train, test = digits.train_data(), digits.test_data()
    assert (len(train), len(test)) == (1437, 360)
    assert torch.bincount(test.tensors[1]).tolist() == pytest.approx([36] * 10, abs=1.1)
    assert train.tensors[0].min() == 0
    assert train.tensors[0].max() == 1


def test_each_character_is_followed_by_the_next() -> None:
    blocks, following = characters.test_data().tensors
    assert torch.equal(blocks.flatten()[1:], following.flatten()[:-1])
    assert len(characters.train_data()) > 5000


@pytest.mark.parametrize(("name", "batch", "before", "after"), [("digits", 32, 2.2, 1.5), ("characters", 8, 4.4, 3.4)])
def test_the_loss_falls(name: str, batch: int, before: float, after: float) -> None:
    torch.manual_seed(0)
    model, data = module(name).model(), module(name).train_data()
    assert isinstance(data, TensorDataset)
    optimizer = module(name).optimizer(model.parameters())
    losses = []
    for _ in range(12):
        inputs, target = data[torch.randint(len(data), (batch,))]
        loss = module(name).loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > before
    assert losses[-1] < after
