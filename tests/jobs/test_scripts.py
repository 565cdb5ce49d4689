"""An ordinary job over functions equals a user's script on whole batches, and `verify` says to what a job is equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from funcpipe.errors import PlanError
from funcpipe.show.runs import verification
from funcpipe.training.averaging import EMA
from funcpipe.training.local_steps import OuterStep
from funcpipe.training.verify import Reference
from tests.examples import in_long_run
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


LOCAL = {"sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize("make", [batch_normalised, *in_long_run([Residual])])
def test_verify_compares_replicas_that_train_alone_with_the_same_algorithm(make: Callable[[], nn.Module]) -> None:
    script = Script(make=lambda: (make(), F.cross_entropy), samples=vectors)
    found = verify(script, replicas=2, plan_changes=LOCAL)
    assert (found.agrees, found.reference, found.off_whole) == (True, Reference.LOCAL, None)
    assert "equal to the same algorithm in one process" in str(verification(found))
    rounded = verify(script, replicas=2, plan_changes={**LOCAL, "wire_sync": "bf16"})
    assert rounded.agrees
    assert verify(script, replicas=2, plan_changes={**LOCAL, "shard_optimizer": True}).agrees
    late = {**LOCAL, "sync_every": 3, "sync_fragments": 2, "sync_delay": 1}
    assert verify(script, replicas=2, plan_changes=late).agrees


def test_verify_finds_replicas_that_meet_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OuterStep, "begin_step", rounds_of_one_step(OuterStep.begin_step))
    found = verify(Script(make=lambda: (Residual(), F.cross_entropy), samples=vectors), replicas=2, plan_changes=LOCAL)
    assert not found.agrees


def rounds_of_one_step(begin_step: Callable[[OuterStep], None]) -> Callable[[OuterStep], None]:
    """As `begin_step`, but with what a replica has now as that on which all have met."""

    def begin(step: OuterStep) -> None:
        step.is_in_round = False
        begin_step(step)

    return begin


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"average": EMA(decay=0.9)}, "average: it averages the parameters after every step"),
        ({"on_nan": "skip"}, "on_nan=skip"),
        ({"precision": "fp16"}, "precision=fp16"),
        ({"reduction": "tokens"}, "a loss with weights"),
    ],
)
def test_what_has_no_meaning_alone_is_refused_before_anything_runs(recipe: dict[str, Any], reason: str) -> None:
    script = Script(make=lambda: (Residual(), F.cross_entropy), samples=vectors, recipe=recipe)
    with pytest.raises(PlanError, match=f"replicas that meet every few steps do not allow {reason}.*sync_every=1"):
        run_over_functions(script, replicas=2, plan_changes={**LOCAL, "precision": recipe.get("precision", "fp32")})
    run_over_functions(script, replicas=1, plan_changes={**LOCAL, "precision": recipe.get("precision", "fp32")})
