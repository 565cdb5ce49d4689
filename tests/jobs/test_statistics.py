"""Running statistics over functions equal those of a script that accumulates gradients over the same micro-batches."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from funcpipe.core import ScheduleKind
from funcpipe.errors import ModelError, PlanError
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.training.averaging import EMA, WeightAverage
from funcpipe.training.batchnorm import RunningStatistics
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import AVERAGED, capture_state
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference

WIDTH = 6


def samples(number: int = 27) -> list[tuple[Tensor, Tensor]]:
    """The last global batch has fewer micro-batches, the last of which is smaller.

    In double precision, as a chain of norms over a few samples each amplifies rounding.
    """
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(WIDTH, generator=generator).double() * 2 + 1, torch.tensor(i % 3)) for i in range(number)]


def chain(*norms: nn.Module) -> nn.Module:
    """Each norm behind a linear layer of its own."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), norm, nn.Tanh()) for norm in norms]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def script_of(make: Callable[[], nn.Module], **settings: Any) -> Script:
    return Script(make=lambda: (make().double(), F.cross_entropy), samples=samples, **settings)


def accumulated(script: Script) -> nn.Module:
    """The model after a script that accumulates gradients over the micro-batches of each global batch, in order."""
    model, loss = script.made()
    optimizer = script.optimizer(model.parameters())
    rows = script.samples()
    for start in range(0, len(rows), script.global_batch):
        batch = rows[start : start + script.global_batch]
        optimizer.zero_grad()
        for first in range(0, len(batch), script.micro_batch):
            part = batch[first : first + script.micro_batch]
            x, target = (torch.stack(tensors) for tensors in zip(*part, strict=True))
            (loss(model(x), target) * (len(part) / len(batch))).backward()
        optimizer.step()
    return model


def assert_equal(script: Script, **plan: Any) -> None:
    worst, name = worst_difference(script, run_over_functions(script, **plan), accumulated(script))
    assert worst < EQUAL, f"{name}: {worst}"


class AsImages(nn.Module):
    """An InstanceNorm over vectors that are seen as two channels."""

    def __init__(self, norm: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.norm = norm
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, -1)
        for _ in range(self.calls):
            x = self.norm(x) + 0.5 * x
        return x.flatten(1)


def instance_norm(**settings: Any) -> nn.Module:
    return nn.InstanceNorm1d(2, affine=True, track_running_stats=True, **settings)


class Twice(nn.Module):
    """One norm, called for two inputs in each forward."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(2 * x.abs())  # type: ignore[no-any-return]


def eval_norm() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_var = torch.full((WIDTH,), 3.0)
    return norm.eval()


class LookAlike(nn.Module):
    """A norm of the user's own, of the same rule."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, momentum: float = 0.2) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        if self.training:
            self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean.detach())
            self.running_var.mul_(1 - self.momentum).add_(self.momentum * var.detach())
        return (x - mean) / (var + 1e-5).sqrt()


def every_norm() -> nn.Module:
    """A model with norms of all settings, whose statistics replicas can add up."""
    return chain(
        nn.BatchNorm1d(WIDTH, momentum=0.3),
        nn.BatchNorm1d(WIDTH, momentum=None),
        nn.BatchNorm1d(WIDTH, momentum=0.0),
        nn.BatchNorm1d(WIDTH, momentum=1.0, affine=False),
        eval_norm(),
        Twice(nn.BatchNorm1d(WIDTH)),
        Twice(nn.BatchNorm1d(WIDTH, momentum=None)),
        nn.SyncBatchNorm(WIDTH),
        AsImages(instance_norm()),
        AsImages(instance_norm(momentum=0.4), calls=2),
        AsImages(instance_norm(momentum=None)),
        LookAlike(),
    )


@pytest.mark.parametrize(("stages", "replicas", "recompute"), [(2, 1, True), (3, 2, False)])
def test_statistics_of_every_norm(stages: int, replicas: int, recompute: bool) -> None:
    assert_equal(script_of(every_norm), stages=stages, replicas=replicas, recompute=recompute)


def test_one_replica_computes_statistics_in_the_order_of_a_script() -> None:
    script = script_of(lambda: chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)))
    found, expected = run_over_functions(script, schedule=ScheduleKind.ONE_F_ONE_B), accumulated(script)
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.named_buffers() if name.startswith("0."))


def test_an_average_of_buffers_follows_those_that_a_forward_replaces() -> None:
    norm = nn.BatchNorm1d(2)
    average = WeightAverage(EMA(decay=0.5, use_buffers=True), norm)
    average.update(1)
    norm.running_mean = torch.ones(2)
    average.update(2)
    state = average.added_to(capture_state(norm, None, GradientNorm()))
    assert state.tensors[AVERAGED + "running_mean"].tolist() == [0.5, 0.5]


class ReadsStatistics(nn.Module):
    """The norm's output depends on the statistics of the micro-batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        drift = self.norm.get_buffer("running_var").mean()
        output: Tensor = self.norm(x) * (1 + 0.1 * drift)
        return output


class Penalised(nn.Module):
    """The output depends on all statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                output = output * (1 + 0.01 * module.get_buffer("running_mean").square().sum())
        return output


class Renorm(nn.Module):
    """Batch Renormalization: the output is corrected by running statistics, more and more as calls are counted."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.momentum = 0.1
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        std, running_std = (var + 1e-5).sqrt(), (self.running_var + 1e-5).sqrt()
        limit = 1 + (self.num_batches_tracked.float() / 4).clamp(max=2)
        r = torch.minimum(std.detach() / running_std, limit)
        d = torch.minimum((mean.detach() - self.running_mean) / running_std, limit - 1)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_(var.detach(), self.momentum)
        self.num_batches_tracked.add_(1)
        return (x - mean) / std * r + d


class ByRunning(nn.BatchNorm1d):
    """Normalises by its running statistics in training too, once it has updated them."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Copies(nn.Module):
    """Keeps a slow average of the statistics, which nothing reads."""

    slow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("slow", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.slow.lerp_(self.norm.get_buffer("running_mean"), 0.1)
        output: Tensor = self.norm(x)
        return output


class Clipped(LookAlike):
    """Does not let its running mean move far at a time."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.running_mean.clone()
        output = super().forward(x)
        self.running_mean.copy_(before + (self.running_mean - before).clamp(-0.02, 0.02))
        return output


READ: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "drift": (ReadsStatistics, r"drift = self\.norm"),
    "renormalised": (Renorm, r"running_std = "),
    "by running statistics": (lambda: ByRunning(WIDTH), r"return F\.batch_norm\(input, "),
    "copies": (Copies, r"self\.slow\.lerp_"),
    "clipped": (Clipped, r"0\.1 \(Clipped.*does not update as"),
}


@pytest.mark.parametrize("recompute", [False, True])
def test_statistics_that_a_forward_reads_are_those_of_a_script(recompute: bool) -> None:
    script = script_of(lambda: chain(*(make() for make, _ in READ.values())))
    assert_equal(script, stages=3, recompute=recompute, schedule=ScheduleKind.ONE_F_ONE_B)


@pytest.mark.parametrize("name", READ)
def test_statistics_that_a_forward_reads_are_refused_with_replicas(name: str) -> None:
    make, line = READ[name]
    with pytest.raises(PlanError, match=rf"0\.1.*running statistics.*{line}.*replicas=\(1,\).*GroupNorm"):
        run_over_functions(script_of(lambda: chain(make(), nn.BatchNorm1d(WIDTH))), stages=1, replicas=2)


def test_a_model_that_reads_all_its_statistics() -> None:
    with pytest.raises(PlanError, match=r"and 2 more \(running statistics.*square\(\).*replicas=\(1,\).*GroupNorm"):
        run_over_functions(script_of(Penalised), stages=1, replicas=2)
    assert_equal(script_of(Penalised), stages=1)


def test_norms_without_statistics_are_a_way_out() -> None:
    assert_equal(script_of(lambda: chain(nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH))), replicas=2)


def test_whole_batches_equal_a_script_on_whole_batches() -> None:
    script = replace(script_of(lambda: chain(ReadsStatistics(), Renorm())), micro_batch=16)
    worst, name = worst_difference(script, run_over_functions(script), run_script(script)[0])
    assert worst < EQUAL, name


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward, and its statistics updated again."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Sometimes(nn.Module):
    """Calls its norm in some forwards only, as its data have it; runs as one block."""

    def __init__(self, inner: nn.Module, least: float) -> None:
        super().__init__()
        self.inner = inner
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().sum()) >= self.least else x


def block(inner: nn.Module) -> nn.Module:
    """A block that always calls `inner`."""
    return Sometimes(inner, -math.inf)


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH, affine=False)


def sometimes(norm: Callable[[], nn.Module], least: float) -> nn.Module:
    return nn.Sequential(
        Sometimes(norm(), least), nn.Linear(WIDTH, WIDTH), Sometimes(norm(), least), nn.Linear(WIDTH, 3)
    )


@pytest.mark.parametrize("norm", [batch_norm, lambda: AsImages(instance_norm())])
@pytest.mark.parametrize("least", [0.0, 20.0])
def test_one_replica_calls_norms_in_some_forwards_only(norm: Callable[[], nn.Module], least: float) -> None:
    assert_equal(script_of(lambda: sometimes(norm, least)), stages=2, recompute=True)


@pytest.mark.parametrize("least", [-math.inf, math.inf])
def test_replicas_call_norms_in_blocks_always_or_never(least: float) -> None:
    assert_equal(script_of(lambda: sometimes(batch_norm, least)), stages=2, replicas=2)


@pytest.mark.parametrize("least", [0.0, 1e6])
def test_replicas_do_not_call_norms_in_some_forwards_only(least: float) -> None:
    model = sometimes(batch_norm, least)
    graph = trace(model, (torch.ones(4, WIDTH),))
    stage = split(graph, [(0, len(graph.layers))])[0]
    assert len(stage.statistics) == 2
    statistics = RunningStatistics(stage, stage.statistics)
    statistics.begin_step(2)
    x = torch.randn(4, WIDTH).abs()
    stage({"input": x if least else -x})
    stage({"input": -x if not least else 1e7 * x})
    with pytest.raises(
        ModelError, match=r"0\.inner was called . times in each .* not in .* 1.*replicas=\(1,\).*GroupNorm"
    ):
        statistics.after_forward(1)


def test_a_norm_in_a_block_that_counts_no_calls_is_refused_with_replicas() -> None:
    with pytest.raises(PlanError, match=r"0\.inner\.norm, which does not count its calls.*replicas=\(1,\)"):
        run_over_functions(script_of(lambda: sometimes(lambda: AsImages(instance_norm()), 0.0)), replicas=2)


def checkpointed(norm: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], reentrant: bool) -> nn.Module:
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), norm(), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*(wrap(Checkpointed(one, reentrant)) for one in inner), nn.Linear(WIDTH, 3))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "momentum": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "called twice": lambda: Twice(nn.BatchNorm1d(WIDTH)),
    "instances": lambda: AsImages(instance_norm()),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_checkpoints_update_statistics_again(norm: str, reentrant: bool) -> None:
    script = script_of(lambda: checkpointed(NORMS[norm], nn.Sequential, reentrant))
    assert_equal(script, stages=2)
    assert_equal(script, stages=2, replicas=2, recompute=True)


@pytest.mark.parametrize(("replicas", "recompute"), [(1, False), (1, True), (2, False)])
def test_checkpoints_in_blocks_update_statistics_again(replicas: int, recompute: bool) -> None:
    script = script_of(lambda: checkpointed(NORMS["momentum"], block, False))
    assert_equal(script, stages=2, replicas=replicas, recompute=recompute)


class OnceOutside(nn.Module):
    """One call of the norm lies inside a checkpoint, the other outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + checkpoint(self.norm, 2 * x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [OnceOutside, *(partial(checkpointed, norm, nn.Sequential, False) for norm in (ReadsStatistics, Copies))]
)
def test_other_changes_by_checkpoints_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"norm.*backward.*checkpoint.*recompute='allow'"):
        trace(make(), (torch.randn(4, WIDTH),))
