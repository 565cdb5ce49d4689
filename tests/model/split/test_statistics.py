"""Running statistics over replicas equal those of one process that runs all micro-batches in order."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.model.split import StageModule, split
from funcpipe.training.carried import RunningStatistics


class Norms(nn.Module):
    """BatchNorm with every setting, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(3, momentum=0.1)
        self.b = nn.BatchNorm1d(3, momentum=None)
        self.c = nn.BatchNorm1d(3, momentum=0.4, affine=False)
        self.d = nn.BatchNorm1d(3, track_running_stats=False)
        self.e = nn.BatchNorm1d(3, momentum=None)
        self.e.eval()

    def forward(self, input: Tensor) -> Any:
        x = self.a(input)
        return self.e(self.d(self.c(2 * self.b(x) + self.c(x) + self.b(input))))


def one_stage(model: nn.Module, x: Tensor) -> StageModule:
    graph = trace(model, (x,))
    return split(graph, [(0, len(graph.layers))])[0]


def run_step(
    replicas: list[StageModule], merged: list[RunningStatistics], batches: list[Tensor], recompute: bool
) -> None:
    for statistics in merged:
        statistics.begin_step(len(batches))
    for m, x in enumerate(batches):
        replicas[m % len(replicas)]({"input": x})
        merged[m % len(replicas)].after_forward(m)
    if recompute:
        for m in reversed(range(len(batches))):
            replicas[m % len(replicas)]({"input": batches[m]})
            merged[m % len(replicas)].after_forward(m)
    parts = [statistics.contributions() for statistics in merged]
    summed = [torch.stack(pieces).sum(0) for pieces in zip(*parts, strict=True)]
    for statistics in merged:
        statistics.finish_step([tensor.clone() for tensor in summed])


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_replicas_together_equal_one_process(replicas: int, recompute: bool) -> None:
    torch.manual_seed(1)
    model = Norms()
    stages = [one_stage(copy.deepcopy(model), torch.randn(5, 3)) for _ in range(replicas)]
    merged = [RunningStatistics(stage, stage.statistics) for stage in stages]
    for micro_batches in (6, 3, 4):  # the last steps are shorter
        batches = [torch.randn(4, 3) * 2 + 1 for _ in range(micro_batches)]
        run_step(stages, merged, batches, recompute)
        for x in batches:
            model(x)
        for stage in stages:
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(stage.state_dict()[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_a_replica_without_a_micro_batch_still_agrees() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    x = torch.randn(5, 3)
    stages = [one_stage(copy.deepcopy(model), x) for _ in range(2)]
    plain = copy.deepcopy(model)
    run_step([stages[0], stages[1]], [RunningStatistics(stage, stage.statistics) for stage in stages], [x], False)
    plain(x)
    for stage in stages:
        torch.testing.assert_close(stage.state_dict(), plain.state_dict())


def test_a_stage_without_statistics_contributes_nothing() -> None:
    stage = one_stage(nn.Sequential(nn.Linear(3, 3)), torch.randn(5, 3))
    statistics = RunningStatistics(stage, stage.statistics)
    statistics.begin_step(2)
    stage({"input": torch.randn(5, 3)})
    statistics.after_forward(0)
    assert statistics.contributions() == []
    statistics.finish_step([])
