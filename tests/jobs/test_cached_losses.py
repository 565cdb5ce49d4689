"""Losses that couple the samples of a batch, with coupled="cache": trained as a script trains them on whole batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe import DataError, FuncPipe
from funcpipe.client.follow.launch import _record
from funcpipe.core import Coupled, ScheduleKind, Sync
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.neighbours.parameter_server.training import check_servable
from funcpipe.neighbours.parameter_server.worker_group import Updates
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.recipe import Recipe
from funcpipe.training.verify import Reference
from tests.in_process import prepared_run
from tests.jobs.scripts import SGD, Script, job_of, run_over_functions, run_script, verify, worst_difference
from tests.jobs.test_loss_state import Centre, Margin
from tests.jobs.test_losses import COUPLED, Residual, Then, contrast, correlation, several, vectors
from tests.support.run_keys import NONCE

EXACT = 1e-9
"""Of an update, in 64 bits."""

CACHE = {"coupled": "cache"}


def doubles(samples: int = 48) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in vectors(samples)]


def cached(make: Callable[[], tuple[nn.Module, Any]], samples: int = 48, **changes: Any) -> Script:
    """A job in 64 bits, so that rounding is nothing beside an update."""

    def in_64_bits() -> tuple[nn.Module, Any]:
        model, loss = make()
        return model.double(), loss.double() if isinstance(loss, nn.Module) else loss

    return Script(make=in_64_bits, samples=lambda: doubles(samples), recipe=CACHE, **changes)


class Scaled(nn.Module):
    """Two towers and a temperature, as CLIP returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Residual(), Residual()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"sides": [self.left(x), self.right(x.flip(1))], "scale": self.scale.exp() * 2, "parameter": self.scale}


def clip(output: dict[str, Any], target: Tensor) -> Tensor:
    a, b = (F.normalize(side, dim=1) for side in output["sides"])
    logits, pairs = output["scale"].clamp_(max=100.0) * a @ b.T, torch.arange(len(a))
    loss: Tensor = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
    return loss.add(output["parameter"].square(), alpha=0.01)


def in_place(output: Tensor, target: Tensor) -> Tensor:
    """Writes into what it is given."""
    output.sub_(output.mean(0).detach())
    target.add_(1)
    return F.cross_entropy(output, target - 1) + output.T.cov().square().sum()


def against_soft_targets(output: Tensor, target: Tensor) -> Tensor:
    """Takes no target that requires a gradient."""
    assert not target.requires_grad
    return F.binary_cross_entropy(output.sigmoid(), target) + output.var(0).sum()


def soft(rows: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in rows]), torch.stack([(0.1 + y / 4).double().expand(3) for _, y in rows])


def hardest(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none").topk(3).values.mean()


class Prototypes(nn.Module):
    """Contrast with centres of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = Margin()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.margin(output, target) + 0.1 * correlation(output, target)
        return found


def temporal(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Samples lie along the second dimension."""
    return torch.stack([x.view(2, 12) for x, _ in rows], 1), torch.stack([y.expand(2) for _, y in rows], 1)


class Time(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 24), Residual()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x))
        return out


def over_time(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten()) + correlation(output[0], target[0])


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a job is cut."""

    stages: int = 2
    replicas: int = 1
    recompute: bool = False
    changes: tuple[tuple[str, Any], ...] = ()


JOBS: dict[str, tuple[Script, Cut]] = {
    "contrast": (cached(lambda: (Then(lambda y, x: (y, x[:, :3])), contrast)), Cut()),
    "contrast, one stage": (
        cached(lambda: (Then(lambda y, x: (y, x[:, :3])), contrast)),
        Cut(stages=1, replicas=2, changes=(("sync", Sync.STREAMED),)),
    ),
    "ranking": (
        replace(cached(COUPLED["ranking"].make), epochs=2),
        Cut(stages=3, replicas=4, recompute=True),
    ),
    "dice": (cached(COUPLED["dice"].make), Cut(replicas=2, changes=(("shard_optimizer", True),))),
    "towers and a temperature": (cached(lambda: (Scaled(), clip)), Cut(stages=3, replicas=2, recompute=True)),
    "writes": (cached(lambda: (Residual(), in_place)), Cut(replicas=2)),
    "the hardest, short batches": (cached(lambda: (Residual(), hardest), samples=45), Cut(replicas=4)),
    "the last batch of one micro-batch": (
        cached(lambda: (Residual(), hardest), samples=51, epochs=2),
        Cut(stages=1, replicas=2, recompute=True),
    ),
    "parameters of its own": (
        cached(lambda: (Residual(), Prototypes()), samples=34, epochs=2),
        Cut(replicas=2),
    ),
    "one by one": (cached(lambda: (Residual(), hardest), micro_batch=1), Cut(replicas=4)),
    "a mean over samples": (cached(lambda: (Residual(), F.cross_entropy)), Cut()),
    "a sum over samples": (cached(lambda: (Residual(), partial(F.cross_entropy, reduction="sum"))), Cut(replicas=2)),
    "the second dimension": (cached(lambda: (Time(), over_time), collate=temporal), Cut(replicas=2)),
    "soft targets": (cached(lambda: (Residual(), against_soft_targets), collate=soft), Cut(replicas=2, recompute=True)),
    "one micro-batch": (cached(lambda: (Residual(), hardest), micro_batch=16), Cut()),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_coupled_loss_is_trained_as_on_whole_batches(name: str) -> None:
    script, cut = JOBS[name]
    found = run_over_functions(
        script, stages=cut.stages, replicas=cut.replicas, recompute=cut.recompute, plan_changes=dict(cut.changes)
    )
    model, loss = run_script(script)
    difference, where = worst_difference(script, found, model)
    assert difference < EXACT, where
    if isinstance(loss, nn.Module):
        expected = {f"<loss>.{name}": parameter for name, parameter in loss.named_parameters()}
        assert expected
        assert all(torch.allclose(found[name], parameter, rtol=1e-12) for name, parameter in expected.items())


def test_state_of_a_loss_is_kept_with_one_replica() -> None:
    """It is called once for a global batch, as in one process."""
    script = replace(cached(lambda: (Residual(), Centre()), samples=40), epochs=2)
    found, (model, loss) = run_over_functions(script), run_script(script)
    assert worst_difference(script, found, model)[0] < EXACT
    assert torch.allclose(found["<loss>.centre"], loss.centre)
    with pytest.raises(PlanError, match=r"calls it 2 times .*; plan with one replica and coupled='cache'"):
        run_over_functions(script, replicas=2)


def test_batchnorm_sees_micro_batches_as_ever() -> None:
    script = Script(make=lambda: (Residual(norm=lambda: nn.BatchNorm1d(24)), correlation), samples=vectors)
    script = replace(script, recipe=CACHE)
    for replicas in (1, 2):
        found = verify(script, replicas=replicas)
        assert (found.agrees, found.reference) == (True, Reference.ACCUMULATED)
        assert found.off_whole is not None


@pytest.mark.parametrize("recipe", [{"precision": "bf16"}, {"precision": "fp16"}, {"clip_grad_norm": 0.1}])
def test_verify_compares_with_whole_batches(recipe: dict[str, Any]) -> None:
    script = replace(COUPLED["dice"], recipe={**CACHE, **recipe})
    found = verify(script, replicas=2)
    assert (found.agrees, found.reference) == (True, Reference.WHOLE)


def test_verify_finds_what_accumulation_would_train() -> None:
    """A run that accumulates the same loss is equal to neither reference of a cached one."""
    from funcpipe.training.verify import TOLERANCE, verify_run

    averaged = replace(COUPLED["contrast"], recipe={"coupled": "accumulate"})
    job = job_of(replace(COUPLED["contrast"], recipe=CACHE))
    found = verify_run(
        run_over_functions(averaged), job.plain_training(averaged.made()[0]), steps=job.steps, tolerance=TOLERANCE
    )
    assert not found.agrees


def not_finite(output: Tensor, target: Tensor) -> Tensor:
    """NaN where the batch holds a certain sample."""
    bad = (output.detach().abs().max() > 1e4).to(output.dtype)
    return hardest(output, target) + torch.log(1 - 2 * bad)


def test_a_step_whose_loss_is_not_finite_is_left_out() -> None:
    rows = doubles()
    rows[20] = (rows[20][0] * 1e6, rows[20][1])
    script = cached(lambda: (Residual(), not_finite))
    skipping = replace(script, samples=lambda: rows, recipe={**CACHE, "on_nan": "skip"})
    without = replace(script, samples=lambda: [*rows[:16], *rows[32:]])
    for replicas in (1, 2):
        found = run_over_functions(skipping, replicas=replicas)
        assert worst_difference(skipping, found, run_script(without)[0])[0] < EXACT


REFUSED: dict[str, tuple[Script, str]] = {
    "a matrix": (
        COUPLED["a matrix of all with all"],
        r"output is a tensor \[4, 4\] for 4 samples and a tensor \[8, 8\] for 8, so that those of micro-batches cannot",
    ),
    "a number of the batch": (
        COUPLED["balance in the model"],
        r"output\.1 is a tensor \[\] and a tensor \[\] for 4 and 4 samples, which cannot be laid side by side: "
        r"coupled='cache' needs outputs and targets that are tensors \[samples, …\] of one shape, or the same in all",
    ),
    "means of the batch": (
        Script(
            make=lambda: (Then(lambda y, x: (y, y.mean(0))), lambda o, t: contrast((o[0], o[0]), t)), samples=vectors
        ),
        r"output\.1 is a tensor \[3\] and a tensor \[3\] for 4 and 4 samples, which cannot be laid side by side",
    ),
    "other lengths": (COUPLED["tokens, padded"], r"output is a tensor \[4, \d, 40\] and a tensor \[4, \d, 40\] for 4"),
    "lists": (
        Script(make=lambda: (Residual(), lambda o, t: o.sum()), samples=vectors, collate=several),
        "outputs or targets of 8 and of 4 samples differ in their parts",
    ),
    "a count": (
        Script(
            make=lambda: (Residual(), lambda o, t: F.cross_entropy(o, t[0]) / t[1]),
            samples=vectors,
            collate=lambda rows: (torch.stack([x for x, _ in rows]), (torch.stack([y for _, y in rows]), len(rows))),
        ),
        r"target\.1 of 8 samples is not what two parts of 4 make, side by side .*: the collate function makes",
    ),
    "pairs of the batch as targets": (
        Script(
            make=lambda: (Residual(), F.cross_entropy),
            samples=vectors,
            collate=lambda rows: (torch.stack([x for x, _ in rows]), torch.arange(len(rows)) % 3),
        ),
        r"target of 8 samples is not what two parts of 4 make, side by side",
    ),
    "a forward that couples samples": (
        Script(make=lambda: (Then(lambda y, x: y - y.mean(0)), correlation), samples=vectors),
        r"output of 8 samples is not what two parts of 4 make, side by side \(off by 0\.\d+ of itself\).*: the model's "
        "forward makes something else of samples that run together",
    ),
    "one size only": (
        Script(make=lambda: (Then(lambda y, x: y.view(4, 3)), F.cross_entropy), samples=vectors),
        "the model fails on samples of several micro-batches together",
    ),
}


def test_outputs_that_do_not_make_a_whole_batch_are_refused_before_anything_starts() -> None:
    for name, (script, said) in REFUSED.items():
        with pytest.raises(DataError, match=said) as error:
            job_of(replace(script, recipe=CACHE), stages=1)
        assert "coupled='cache'" in str(error.value) or "whole batch" in str(error.value), name


def test_lengths_that_no_trial_has_seen_end_the_run() -> None:
    """The longest sample is none of those that are tried."""
    script = cached(lambda: (Residual(), hardest))
    job = job_of(script)
    assert job.layout is not None
    output = torch.zeros(4, 3)
    with pytest.raises(DataError, match=r"output is a tensor \[4, 3\] and a tensor \[4, 5\] for 4 and 4 samples"):
        job.layout.join([(output, output[:, 0]), (torch.zeros(4, 5), output[:, 0])], [4, 4])
    with pytest.raises(DataError, match=r"target is a tensor \[4\] and a tensor \[3\] for 4 and 4 samples"):
        job.layout.join([(output, output[:, 0]), (output, output[:3, 0])], [4, 4])


def test_a_coupled_loss_is_refused_with_caching_as_a_way_out_unless_it_is_the_model_s_own() -> None:
    with pytest.raises(
        DataError, match=r"plan and train with coupled='cache' \(--set training.coupled=cache\), which keeps the"
    ):
        job_of(COUPLED["contrast"])
    with pytest.raises(DataError, match="is not the mean of its micro-batches' losses") as error:
        job_of(COUPLED["own loss"])
    assert "cache" not in str(error.value)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"needs a loss_fn .*: the model computes its loss in its forward"):
        FuncPipe(COUPLED["own loss"].made()[0], optimizer=SGD, coupled="cache")
    with pytest.raises(InvalidValue, match="must not be cache beside reduction='weighted'"):
        FuncPipe(Residual(), loss_fn=contrast, optimizer=SGD, coupled="cache", reduction="weighted")
    script = replace(COUPLED["contrast"], recipe=CACHE)
    with pytest.raises(InvalidValue, match="must be gpipe with joint_loss"):
        run_over_functions(script, schedule=ScheduleKind.ONE_F_ONE_B)
    with pytest.raises(PlanError, match="the plan computes it for each micro-batch: plan with FuncPipe"):
        run_over_functions(script, plan_changes={"joint_loss": False})
    with pytest.raises(PlanError, match="workers do not see each other's outputs"):
        check_servable(job_of(script), Updates.BSP)
    other = replace(script, recipe={"coupled": "accumulate"})
    with pytest.raises(
        PlanError, match=r"train with coupled='cache' \(--set training.coupled=cache\), not 'accumulate'"
    ):
        run_over_functions(other, plan_changes={"joint_loss": True})


def test_a_run_says_that_its_losses_are_of_whole_batches() -> None:
    job, storage = job_of(replace(COUPLED["contrast"], recipe=CACHE)), MemoryStorage()
    record = _record(prepared_run(job, storage), Keys("run-1", 0, NONCE))
    assert record.loss_over == "whole global batches, as in gradient caching"
    assert Recipe(loss=contrast, optimizer=SGD, coupled=Coupled.CACHE).loss_over == record.loss_over
    assert "loss: computed for whole global batches" in repr(job.plan)
