"""Running statistics where code of the user's own decides on calls of a norm: in checkpoints, and in blocks."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from funcpipe.errors import ModelError, PlanError
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.training.carried import RunningStatistics
from tests.examples import in_long_run
from tests.jobs.norms import (
    WIDTH,
    AsImages,
    Copies,
    ReadsStatistics,
    Twice,
    assert_equal,
    instance_norm,
    script_of,
)
from tests.jobs.scripts import run_over_functions


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


OFTEN = [("momentum", False), ("cumulative", True), ("called twice", False), ("instances", True)]


@pytest.mark.parametrize(
    ("norm", "reentrant"), [*OFTEN, *in_long_run((norm, not reentrant) for norm, reentrant in OFTEN)]
)
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
