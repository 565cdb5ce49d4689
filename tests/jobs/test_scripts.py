"""An ordinary job over functions equals a user's script on whole batches, and `verify` says to what a job is equal."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from funcpipe.training.verify import Reference
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, verify, worst_difference


class Residual(nn.Module):
    """Blocks one after the other, each added to its input, and a head."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), norm(), nn.Tanh()) for _ in range(blocks))
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


def test_verify_compares_with_whole_batches() -> None:
    found = verify(Script(make=lambda: (Residual(), F.cross_entropy), samples=vectors), replicas=2)
    assert found.agrees
    assert (found.reference, found.off_whole) == (Reference.WHOLE, None)


def batch_normalised() -> nn.Module:
    return Residual(lambda: nn.BatchNorm1d(24))


def test_verify_says_that_only_accumulation_is_equal_where_a_norm_couples_samples() -> None:
    found = verify(Script(make=lambda: (batch_normalised(), F.cross_entropy), samples=vectors))
    assert found.agrees
    assert found.reference is Reference.ACCUMULATED
    assert found.off_whole is not None
    assert found.off_whole.difference > found.tolerance


def test_with_one_micro_batch_a_norm_is_equal_to_whole_batches() -> None:
    found = verify(Script(make=lambda: (batch_normalised(), F.cross_entropy), samples=vectors, micro_batch=16))
    assert (found.agrees, found.reference) == (True, Reference.WHOLE)


def test_verify_does_not_compare_a_model_that_draws_with_whole_batches() -> None:
    script = Script(make=lambda: (Residual(lambda: nn.Dropout(0.1)), F.cross_entropy), samples=vectors)
    found = verify(script, stages=1)  # threads share a generator
    assert (found.agrees, found.reference, found.off_whole) == (True, Reference.ACCUMULATED, None)
