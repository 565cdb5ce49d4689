"""A plan's stages are found in the model it was made for, in eval mode too, and in no other."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from funcpipe.core import Plan, ScheduleKind, Stage, Sync, Wire
from funcpipe.errors import ModelError, PlanError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.split import split, stage_bounds
from funcpipe.model.split.cut import check_shared, matched_bounds
from tests.support.plans import even_stages


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


class Modes(nn.Module):
    """Calls `order` in training and `other` in eval mode."""

    def __init__(self, order: str, other: str) -> None:
        super().__init__()
        self.order, self.other = order, other
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Through the layers, with a dropout that is no module."""
        for name in self.order if self.training else self.other:
            x = functional.dropout(getattr(self, name)(x), 0.5, self.training)
        return x


def bounds(model: nn.Module, stages: int) -> tuple[tuple[int, int], ...]:
    trained = trace(model, (torch.zeros(2, 4),))
    own = plan(*(stage.layers for stage in even_stages([layer.name for layer in trained.layers], stages)))
    evaluated = trace(model, (torch.zeros(2, 4),), training=False)
    found = matched_bounds(evaluated, own)
    check_shared(split(evaluated, found), split(trained, stage_bounds(trained, own)))
    return found


def test_layers_go_to_the_stage_that_has_them_in_training() -> None:
    assert bounds(Modes("abcd", "abcd"), 2) == ((0, 2), (2, 4))
    assert bounds(Modes("abcd", "acd"), 2) == ((0, 1), (1, 3))
    assert bounds(Modes("abcd", "bd"), 2) == ((0, 1), (1, 2))


def test_the_stages_in_eval_mode_compute_what_the_model_does_and_share_its_parameters() -> None:
    model = Modes("abcd", "acd")
    graph = trace(model, (torch.zeros(2, 4),), training=False)
    assert model.training
    one, two = split(graph, ((0, 1), (1, 3)))
    inputs = torch.randn(3, 4)
    sent, _ = one({"x": inputs})
    _, output = two(sent)
    model.eval()
    assert torch.equal(output, model(inputs))
    assert {id(p) for p in (*one.parameters(), *two.parameters())} < {id(p) for p in model.parameters()}


def test_a_plan_that_does_not_fit_the_model_in_eval_mode_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"in eval mode, stage 1 .'c' to 'd'. has no layers; profile this model"):
        bounds(Modes("abcd", "ab"), 2)
    with pytest.raises(PlanError, match="in eval mode, layer 'a' of stage 0 comes after layers of stage 1"):
        bounds(Modes("abcd", "bcda"), 2)


class Late(nn.Module):
    """Uses, in eval mode alone, the parameter of the first layer once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Through both layers."""
        x = self.b(self.a(x))
        return x if self.training else x + self.a.bias


def test_a_stage_that_needs_a_parameter_of_another_in_eval_mode_is_refused() -> None:
    with pytest.raises(ModelError, match=r"in eval mode, stage 1 of the model uses a\.bias, which it does not hold"):
        bounds(Late(), 2)
