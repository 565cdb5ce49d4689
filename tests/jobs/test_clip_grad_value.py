"""Each element of a gradient clipped, as torch.nn.utils.clip_grad_value_ does it in a script."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from funcpipe import FuncPipe
from funcpipe.client.prepare.rehearsal import rehearse
from funcpipe.errors import InputError, InvalidValue, ModelError
from funcpipe.training.data import load_batch
from funcpipe.training.recipe import Recipe
from tests.jobs.scripts import EQUAL, run_over_functions, run_script, worst_difference
from tests.jobs.test_optimizers import MODEL, script
from tests.jobs.test_scripts import Residual


class ClipsByValue(optim.SGD):
    """As a script that calls clip_grad_value_ before each step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 0.003)
        return super().step(closure)


class Tied(nn.Module):
    """The first and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3)))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.first(x).tanh())), self.first.weight)


@pytest.mark.parametrize(
    ("model", "stages", "replicas", "shard_optimizer"),
    [
        (Residual, 1, 1, False),
        (Residual, 3, 2, False),
        (Residual, 2, 2, True),
        (Tied, 3, 1, False),
        (Tied, 2, 2, False),
    ],
)
def test_gradients_are_clipped_by_value_as_in_a_script(
    model: type[nn.Module], stages: int, replicas: int, shard_optimizer: bool
) -> None:
    clips = replace(script(partial(ClipsByValue, lr=0.5, momentum=0.9)), make=lambda: (model(), F.cross_entropy))
    keyword = replace(clips, optimizer=partial(optim.SGD, lr=0.5, momentum=0.9), recipe={"clip_grad_value": 0.003})
    expected = run_script(clips)[0]
    found = run_over_functions(
        keyword, stages=stages, replicas=replicas, plan_changes={"shard_optimizer": shard_optimizer}
    )
    difference, name = worst_difference(clips, found, expected)
    assert difference < EQUAL, name
    assert worst_difference(clips, run_script(keyword)[0].state_dict(), expected)[0] > 100 * EQUAL  # it does something


def test_what_cannot_be_clipped_by_value_is_refused() -> None:
    with pytest.raises(InvalidValue, match="clip_grad_value must not be given beside clip_grad_norm"):
        FuncPipe(MODEL, optimizer=optim.AdamW, clip_grad_value=0.1, clip_grad_norm=1.0)
    with pytest.raises(InvalidValue, match="clip_grad_value must be above 0, got -1"):
        FuncPipe(MODEL, optimizer=optim.AdamW, clip_grad_value=-1)
    numbers = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(
        InputError, match="has no meaning for complex numbers, which weight holds; train with clip_grad"
    ):
        FuncPipe(numbers, optimizer=optim.AdamW, clip_grad_value=0.1)
    FuncPipe(numbers, optimizer=optim.AdamW, clip_grad_norm=0.1)


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_cannot_be_clipped_by_value(sparse: bool) -> None:
    words = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
    recipe = Recipe(loss=F.cross_entropy, optimizer=partial(optim.SGD, lr=0.1), clip_grad_value=0.1)
    batch = load_batch([(torch.tensor([i, i + 1]), i % 3) for i in range(4)], range(4))
    if sparse:
        with pytest.raises(ModelError, match=r"clip the gradient of 0.weight, which is sparse; make .* sparse=False"):
            rehearse(words, recipe, batch, seed=0)
    else:
        rehearse(words, recipe, batch, seed=0)


def test_the_command_line_clips_by_value() -> None:
    from funcpipe.cli.commands import parse

    words = (
        "train",
        "models:net",
        "--plan",
        "plan.json",
        "--data",
        "models:data",
        "--set",
        "training.clip-grad-value=0.5",
    )
    options = parse(words)
    assert options.clip_grad_value == 0.5
