"""Runs whose weights lie in safetensors files equal those of the same module in the client's memory, to the bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from funcpipe.api import FuncPipe
from funcpipe.errors import PlatformRefused
from funcpipe.model.tensors import named_tensors
from tests.e2e.plans import even_plan

optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = torch.relu(self.inner(self.norm(x)))
        result: Tensor = x + self.outer(inner)
        return result


class Model(nn.Module):
    """A language model with a tied head, and positions that are computed when it is made."""

    positions: Tensor

    def __init__(self, blocks: int = 3, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        angles = torch.arange(16.0)[:, None] / 10 ** (torch.arange(width) / width)
        self.register_buffer("positions", torch.sin(angles), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, 11, (2, 6), generator=generator)) for _ in range(16)]


def write(model: nn.Module, folder: Path, *, files: int = 2, without: str = "?") -> Path:
    """The weights of `model` as a folder of Hugging Face's, in several files with an index."""
    folder.mkdir(exist_ok=True)
    seen: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        if without not in name:
            seen.setdefault(id(tensor), name)
    tensors = {name: named_tensors(model)[name].detach().clone() for name in seen.values()}
    names = {f"model-{i}.safetensors": list(tensors)[i::files] for i in range(files)}
    for file, own in names.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in names.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def plan(model: nn.Module, **options: Any) -> Any:
    sample = (torch.zeros(2, 6, dtype=torch.long),)
    return even_plan(model, sample, stages=2, replicas=2, micro_batch=2, micro_batches=2, **options)


def trained(model: nn.Module | Callable[[], nn.Module], chosen: Any, **options: Any) -> Any:
    pipe = FuncPipe(model, loss_fn=loss, optimizer=optimizer, **options)
    return pipe.train(data(), epochs=2, plan=chosen, message_deadline_s=60)


def test_a_run_of_weights_in_files_equals_one_of_the_module(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Model()
    folder, chosen = write(model, tmp_path / "weights"), plan(model)
    found = trained(Model, chosen, weights=str(folder))
    expected = trained(model, chosen)
    assert found.losses == expected.losses
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items())


def test_files_of_this_machine_are_refused_where_functions_run_in_a_cloud(tmp_path: Path) -> None:
    from funcpipe.client.prepare.weights import open_model

    _, weights = open_model(Model, str(write(Model(), tmp_path)))
    weights.check_reachable("local:///socket")
    with pytest.raises(PlatformRefused, match="lie on this machine"):
        weights.check_reachable("aws-lambda://funcpipe?region=eu-central-1")
