"""Modules that are not divided, from a profile to training, by Python and in a shell."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from funcpipe import FuncPipe
from funcpipe.cli import main
from funcpipe.core import ModelProfile, Pins, Plan, read
from funcpipe.errors import PlanError
from tests.model.graph.hard_models import Around, Checkpointed, Experts

SGD = partial(torch.optim.SGD, lr=0.1)


def samples() -> list[tuple[Tensor, Tensor]]:
    """Rows of very different sizes, so that each micro-batch asks for other experts."""
    torch.manual_seed(1)
    return [(torch.randn(4) * 4 ** (i % 3), torch.tensor(i % 4)) for i in range(8)]


def experts() -> Around:
    torch.manual_seed(0)
    return Around(Experts())


def checkpointed() -> Around:
    torch.manual_seed(0)
    return Around(Checkpointed(reentrant=False))


def sample() -> tuple[Tensor]:
    return (torch.stack([x for x, _ in samples()[:2]]),)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters)


def test_blocks_found_while_profiling_are_in_the_plan_and_train_as_one_process() -> None:
    pipe = FuncPipe(experts(), loss_fn=F.cross_entropy, optimizer=SGD)
    measured = pipe.profile(sample(), platform="local", micro_batch=2, repeats=1)
    assert measured.blocks == ("middle",)
    plan = pipe.optimize(global_batch=4, replicas=[1], pins=Pins(cuts=("middle", "last")))
    assert plan.blocks == ("middle",)
    assert len(plan.stages) == 3
    assert pipe.verify(samples(), steps=2).first_difference is None


def test_blocks_of_the_users_are_layers_from_profile_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = "tests.e2e.test_blocks"
    monkeypatch.chdir(tmp_path)
    words = ["--sample", f"{here}:sample", "--micro-batch", "2", "--platform", "local", "--set", "model.repeats=1"]
    assert main(["profile", f"{here}:checkpointed", *words, "--set", "model.block=middle"]) == 0
    assert [layer.name for layer in read(ModelProfile, "profile.json").layers] == ["first", "middle", "last"]
    assert main(["optimize", "profile.json", "--global-batch", "4"]) == 0
    assert read(Plan, "plan.json").blocks == ("middle",)
    words = ["--plan", "plan.json", "--data", f"{here}:samples", "--optimizer", f"{here}:optimizer"]
    assert main(["verify", f"{here}:checkpointed", *words, "--steps", "1", "-q"]) == 0
    assert "agree" in capsys.readouterr().out
    plan = read(Plan, "plan.json")
    pipe = FuncPipe(checkpointed(), loss_fn=F.cross_entropy, optimizer=SGD, blocks=["first", "middle"])
    assert pipe.verify(samples(), steps=1, plan=plan).first_difference is None
    pipe = FuncPipe(checkpointed(), loss_fn=F.cross_entropy, optimizer=SGD, blocks=[""])
    with pytest.raises(PlanError, match=r"the plan .* is for another model"):
        pipe.verify(samples(), steps=1, plan=plan)
