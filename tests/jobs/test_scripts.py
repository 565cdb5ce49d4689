"""An ordinary job over functions equals a user's script on whole batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference


class Residual(nn.Module):
    """Blocks one after the other, each added to its input, and a head."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        output: torch.Tensor = self.head(x)
        return output


def vectors(samples: int = 48) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(24, generator=generator), torch.tensor(i % 3)) for i in range(samples)]


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (3, 2)])
def test_an_ordinary_job_equals_a_script(stages: int, replicas: int) -> None:
    script = Script(make=lambda: (Residual(), F.cross_entropy), samples=vectors, epochs=2)
    found = run_over_functions(script, stages=stages, replicas=replicas)
    difference, name = worst_difference(script, found, run_script(script)[0])
    assert difference < EQUAL, name
