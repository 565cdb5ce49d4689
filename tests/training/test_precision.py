"""Training under autocast: equal to one process that does the same, however the model is cut."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import Precision
from funcpipe.errors import PlanError
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.training.batches import Batches
from funcpipe.training.plain import PlainTraining
from funcpipe.training.recipe import Recipe, check_precision
from tests.support.in_turn import InTurn, even_bounds

SAMPLES = 32


class Part(nn.Module):
    """A residual block, part of which stays in fp32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(16)
        self.b = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(self.norm(x))))
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.float(), (16,))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Part(), nn.Linear(16, 16), nn.Dropout(0.1), Part(), nn.Linear(16, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(8, generator=draw), torch.tensor(i % 4)) for i in range(SAMPLES)]


def training(precision: Precision) -> PlainTraining:
    made = model()
    return PlainTraining(
        model=made,
        graph=trace(made, (torch.randn(4, 8),), precision=precision),
        dataset=data(),
        steps=tuple(Batches(samples=SAMPLES, global_batch=8, micro_batch=4, seed=0, shuffle=True).epoch(0)),
        recipe=Recipe(loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), precision=precision),
        seed=0,
    )


@pytest.mark.parametrize("precision", list(Precision))
def test_any_plan_gives_what_one_process_gives_under_the_same_autocast(precision: Precision) -> None:
    plain = training(precision)
    expected = plain.run(0).end
    for stages in (1, 2, 4):
        found = InTurn(plain, even_bounds(plain.graph, stages), 1).train()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        replicated = InTurn(plain, even_bounds(plain.graph, stages), 2).train()
        for name, tensor in expected.items():
            torch.testing.assert_close(replicated[name], tensor, rtol=1e-5, atol=1e-6)


def test_what_crosses_a_cut_is_what_autocast_makes_it_and_parameters_stay_in_fp32() -> None:
    graph = training(Precision.BF16).graph
    first, *_ = split(graph, even_bounds(graph, 3))
    sent, _ = first({"input": torch.randn(4, 8)})
    assert {tensor.dtype for tensor in sent.values()} & {torch.bfloat16}
    assert {value.dtype for value in graph.values} == {torch.bfloat16, torch.float32}
    assert {tensor.dtype for tensor in first.state_dict().values()} == {torch.float32}


def test_autocast_around_the_caller_is_no_part_of_the_model() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = training(Precision.FP32).graph
    assert {value.dtype for value in graph.values} == {torch.float32}
    assert not any(node.meta.get("autocast") for layer in graph.layers for node in layer.nodes)


def test_the_loss_scale_of_fp16_skips_the_steps_that_torchs_scaler_skips() -> None:
    plain = training(Precision.FP16)
    large = PlainTraining(
        model=plain.model,
        graph=plain.graph,
        dataset=plain.dataset,
        steps=plain.steps,
        recipe=Recipe(loss=_large, optimizer=plain.recipe.optimizer, precision=Precision.FP16),
        seed=0,
    )
    expected = large.run(0)
    turns = InTurn(large, even_bounds(plain.graph, 2), 1)
    found = turns.train()
    scale = turns.workers[0][0].norm.loss_scale
    assert scale is not None
    assert scale.factor < 2.0**16
    assert any(not torch.equal(tensor, expected.start[name]) for name, tensor in expected.end.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.end.items())


def _large(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * 10


def test_a_plan_for_another_precision_is_refused() -> None:
    recipe = training(Precision.BF16).recipe
    with pytest.raises(PlanError, match=r"the plan is for fp32, but the model trains in bf16.*--precision bf16"):
        check_precision("plan", Precision.FP32, recipe)
