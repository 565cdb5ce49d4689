"""Code that no tracer can record becomes one block, and computes what it does alone, whatever the data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.split import split
from tests.model.graph import hard_models as hard
from tests.model.graph.check import check
from tests.model.split.chain import assert_same, run_chain, take_gradients

EXTREME = (torch.zeros(2, 4), torch.full((3, 4), 9.0), 20 * torch.randn(5, 4), -torch.ones(1, 4))


def steep(output: Any) -> Tensor:
    """A loss with large gradients."""
    return 30 * output.pow(2).sum()  # type: ignore[no-any-return]


def checked(middle: nn.Module) -> LayerGraph:
    torch.manual_seed(3)
    return check(hard.Around(middle), (torch.randn(4, 4),), loss=steep, others=EXTREME)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (hard.Experts, "# asks how many"),
        (hard.ExpertsByHits, "# loops over hits"),
        (hard.SplitsByUnique, "# asks how many values there are"),
        (hard.ClampsGradients, "# a hook"),
        (hard.Energy, "# a gradient in a forward"),
        (hard.Jacobian, "# torch.func"),
        (hard.Moves, "# assigns"),
        (hard.GivenModule, "# passes a module"),
        (hard.Remembers, "# reads what another module left"),
    ],
)
def test_the_innermost_module_becomes_a_block_by_itself(kind: type[nn.Module], line: str) -> None:
    graph = checked(kind())
    assert [layer.name for layer in graph.layers] == ["first", "middle", "last"]
    (note,) = graph.notes
    assert note.startswith("kept as one block each: middle: middle")
    assert line in note
    assert f"{hard.__file__}:" in note


@pytest.mark.parametrize("kind", [hard.MeanOfPositive, hard.Repeats, hard.Counts])
def test_sizes_that_depend_on_data_are_read_anew_for_every_micro_batch(kind: type[nn.Module]) -> None:
    graph = checked(kind())
    assert [layer.name for layer in graph.layers] == ["first", "middle.inner", "last"]
    assert graph.notes == ()


def test_a_function_with_a_backward_of_its_own_keeps_it() -> None:
    graph = checked(hard.ClampsByFunction())
    assert [layer.name for layer in graph.layers] == ["first", "middle.inner", "last"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_does_not_hide_layers(reentrant: bool) -> None:
    graph = checked(hard.Checkpointed(reentrant))
    assert [layer.name for layer in graph.layers] == ["first", "middle.inner", "middle.dropout", "last"]
    assert graph.notes == (
        "gradient checkpointing in the forward pass is left out: the plan's `recompute` decides it for each stage",
    )


def test_a_block_that_uses_parameters_of_another_module_becomes_the_module_around_both() -> None:
    graph = checked(hard.Outer())
    assert [layer.name for layer in graph.layers] == ["first", "middle", "last"]
    (note,) = graph.notes
    assert note.startswith("kept as one block each: middle: ")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_modules_are_layers() -> None:
    model = hard.Around(hard.Scripted())
    graph = trace(model, (torch.randn(4, 4),))
    assert [layer.name for layer in graph.layers] == ["first", "middle.inner", "middle.script", "last"]
    stages = split(graph, [(0, 1), (1, 2), (2, 4)])
    for x in (torch.randn(4, 4), *EXTREME):
        output = run_chain(stages, {"x": x}, steep, (5, 2, 9))
        found = take_gradients(model)
        plain = model(x)
        torch.autograd.backward(steep(plain))
        expected = take_gradients(model)
        assert torch.equal(output, plain)
        assert_same(found, expected, 2e-6)
