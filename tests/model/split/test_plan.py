"""A plan's stages are found in the model it was made for, and in no other."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.core import Plan, ScheduleKind, Stage, Sync, Wire
from funcpipe.errors import PlanError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.split import split, stage_bounds


def chain(*widths: int) -> LayerGraph:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return trace(nn.Sequential(*layers), (torch.ones(1, widths[0]),))


def plan(*stages: tuple[str, ...]) -> Plan:
    made = [Stage(first=i, stop=i + 1, size="1GB", memory_mb=1024, layers=names) for i, names in enumerate(stages)]
    return Plan(
        global_batch=4,
        micro_batch=1,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=tuple(made),
        model="Planned",
    )


def test_stages_hold_the_layers_that_the_plan_names() -> None:
    graph = chain(2, 3, 4, 5)
    assert stage_bounds(graph, plan(("0", "1"), ("2",))) == ((0, 2), (2, 3))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([("0", "fc"), ("2",)], r"\(Planned\).*stage 0 expects layer 'fc' where Sequential has '1'"),
        ([("0", "1"), ("2", "3")], r"stage 1 expects layer '3' where Sequential has no more layers"),
        ([("0",), ("1",)], r"ends with layer '1', but Sequential continues with '2'"),
        ([("0", "1"), ()], r"stage 1 expects no layer where Sequential has none"),
    ],
)
def test_a_plan_for_another_model_is_refused(stages: list[tuple[str, ...]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stage_bounds(chain(2, 3, 4, 5), plan(*stages))


def test_a_plan_for_another_width_of_the_model_is_refused() -> None:
    made = plan(("0", "1"), ("2",))
    sizes = (4 * (6 + 3 + 12 + 4), 4 * (20 + 5))
    stages = tuple(replace(stage, parameter_bytes=size) for stage, size in zip(made.stages, sizes, strict=True))
    made = replace(made, stages=stages)
    assert stage_bounds(chain(2, 3, 4, 5), made) == ((0, 2), (2, 3))
    with pytest.raises(
        PlanError, match=r"trainable parameters of stage 1 take 100 bytes there, .* Sequential 120 bytes"
    ):
        stage_bounds(chain(2, 3, 4, 6), made)


@pytest.mark.parametrize("bounds", [[(0, 2)], [(0, 1), (2, 3)], [(0, 0), (0, 3)], [(0, 4)]])
def test_bounds_must_cover_the_layers(bounds: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError):
        split(chain(2, 3, 4, 5), bounds)


def test_calls_of_a_batch_norm_are_not_cut_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.inner = nn.Linear(3, 3)
            self.out = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.norm(self.inner(self.norm(x))))

    graph = trace(Twice(), (torch.randn(4, 3),))
    assert [layer.name for layer in graph.layers] == ["norm", "out"]
