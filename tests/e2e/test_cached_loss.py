"""A loss of the whole batch from a profile to a verified run, in a shell; the model draws random numbers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.cli import main
from funcpipe.core import Plan, read


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.3), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))


def sample() -> tuple[Tensor]:
    return (torch.randn(2, 8),)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, generator=generator), torch.tensor(i % 3)) for i in range(20)]


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """Each sample, some of its features dropped, against all others."""
    rows = F.normalize(F.dropout(output, 0.1), dim=1)
    return F.cross_entropy(rows @ rows.roll(1, 0).T / 0.2, torch.arange(len(rows)))


def test_from_a_profile_to_a_verified_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = "tests.e2e.test_cached_loss"
    monkeypatch.chdir(tmp_path)
    words = ["profile", f"{here}:model", "--sample", f"{here}:sample", "--micro-batch", "2", "--platform", "local"]
    assert main([*words, "--set", "model.repeats=1"]) == 0
    plan = ["optimize", "profile.json", "--global-batch", "8", "--replicas", "2", "--set", "plan.cut=3"]
    assert main([*plan, "--set", "plan.coupled=cache"]) == 0
    assert "loss: computed for whole global batches, once all forwards are done; replicas exchange outputs in" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert read(Plan, "plan.json").joint_loss
    assert main(["explain", "plan.json", "profile.json"]) == 0
    assert "the loss computed for whole global batches" in capsys.readouterr().out
    train = [f"{here}:model", "--plan", "plan.json", "--data", f"{here}:data", "--loss", f"{here}:contrast"]
    assert main(["verify", *train, "--steps", "3", "-q"]) == 0
    assert "all 6 tensors agree" in capsys.readouterr().out
    assert main(["train", *train, "--set", "training.coupled=accumulate"]) == 2
    assert "(--set training.coupled=cache), not 'accumulate'" in " ".join(capsys.readouterr().err.split())
