"""`verify` finds what is wrong around a model, and compares the parameters of a loss too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from funcpipe.training.plain import train_in_one_process
from funcpipe.training.verify import Reference
from tests.jobs.scripts import Script, job_of, verify
from tests.jobs.test_scripts import Residual, vectors


class Margin(nn.Module):
    """A loss with centres of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 3))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.normalize(output) @ F.normalize(self.centres).T * 4, target)


def with_hook() -> Residual:
    model = Residual()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
    return model


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = target != 0
    return (F.cross_entropy(output, target, reduction="none") * kept).sum(), kept.sum()


JOBS = {
    "a loss with parameters": Script(make=lambda: (Residual(), Margin()), samples=vectors),
    "a hook": Script(make=lambda: (with_hook(), F.cross_entropy), samples=vectors),
    "a weighted loss": Script(make=lambda: (Residual(), counted), samples=vectors, recipe={"reduction": "weighted"}),
    "clipped values": Script(
        make=lambda: (Residual(), F.cross_entropy), samples=vectors, recipe={"clip_grad_value": 1e-3}
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_run_is_equal_to_whole_batches_and_the_model_and_its_loss_stay_as_they_were(name: str) -> None:
    made, script = [], JOBS[name]

    def make() -> tuple[nn.Module, object]:
        made.append(script.make())
        return made[-1]

    found = verify(Script(make=make, samples=script.samples, recipe=script.recipe), replicas=2)
    assert (found.agrees, found.reference) == (True, Reference.WHOLE)
    (model, loss), (again, other) = made[0], script.made()
    for one, two in ((model, again), (loss, other)):
        if isinstance(one, nn.Module) and isinstance(two, nn.Module):
            assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
            assert all(parameter.grad is None for parameter in one.parameters())


def test_the_parameters_of_a_loss_are_compared() -> None:
    found = verify(JOBS["a loss with parameters"])
    assert "<loss>.centres" in {tensor.name for tensor in found.tensors}


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(output, dim=1)
    return F.cross_entropy(rows @ rows.roll(1, 0).T / 0.2, torch.arange(len(rows)))


def test_a_coupled_loss_is_equal_to_accumulation_only() -> None:
    script = Script(make=lambda: (Residual(), contrast), samples=vectors, recipe={"coupled": "accumulate"})
    found = verify(script)
    assert (found.agrees, found.reference) == (True, Reference.ACCUMULATED)
    assert found.off_whole is not None


class Masking(nn.Module):
    """Masks only where it does not cache, as FSMT's decoder; it reads data, so that it runs as it is, as a block."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        if bool(x.isnan().any()):
            return made
        return made if self.config.use_cache else made * (torch.arange(24) < 12)


def masking() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(24, 24), Masking(), nn.Linear(24, 3)), F.cross_entropy


def test_caches_of_a_model_are_kept_as_in_a_script() -> None:
    for replicas in (1, 2):
        assert verify(Script(make=masking, samples=vectors), replicas=replicas).agrees


def test_training_in_one_process_keeps_caches_too() -> None:
    torch.manual_seed(0)
    model, loss = masking()
    job = job_of(Script(make=lambda: (model, loss), samples=lambda: vectors(16)), stages=1)
    trained = train_in_one_process(
        model, job.graph, job.dataset(), tuple(job.batches.epoch(0)), recipe=job.recipe, seed=job.seed
    )
    moved = trained.state_dict()["1.linear.weight"] != model.state_dict()["1.linear.weight"]
    assert bool(moved.any(1).all())  # those that a mask would hide, too
