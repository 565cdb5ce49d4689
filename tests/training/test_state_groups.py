"""An optimiser's state: the same groups in every stage, found again when the model is cut otherwise; as a tree."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizers import (
    join_tensors,
    rename_tensors,
    split_tensors,
    stage_optimizer,
    tensor_names_in,
    trainable_shapes,
)
from funcpipe.training.state import capture_state, merge_stages, restore_state, select_for_stage
from tests.examples import at_most

LAYERS = 5
NAMES = [f"{i}.{kind}" for i in range(LAYERS) for kind in ("weight", "bias")]


def network(frozen: Sequence[str], tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.BatchNorm1d(3) if i == 1 else nn.Linear(3, 3) for i in range(LAYERS)))
    if tied:
        made[LAYERS - 1].weight = made[0].weight
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return made


def stages_of(model: nn.Sequential, cuts: Sequence[int]) -> list[nn.ModuleDict]:
    """Stages whose parameters keep the names they have in `model`."""
    bounds = itertools.pairwise([0, *sorted(cuts), LAYERS])
    return [nn.ModuleDict({str(i): model[i] for i in range(first, stop)}) for first, stop in bounds]


class Grouped:
    """Puts parameters into groups by their names, each with a rate of its own; with -1, into none."""

    def __init__(self, make: Any, group_of: dict[str, int], groups: int, named: bool) -> None:
        self.make, self.group_of, self.groups, self.named = make, group_of, groups, named

    def __call__(self, named_parameters: Any) -> Optimizer:
        pairs = list(named_parameters)
        members = [[pair for pair in pairs if self.group_of[pair[0]] == n] for n in range(self.groups)]
        given = members if self.named else [[p for _, p in own] for own in members]
        optimizer: Optimizer = self.make([{"params": own, "lr": 0.01 * (n + 1)} for n, own in enumerate(given)])
        return optimizer


def optimizers_of(stages: Sequence[nn.ModuleDict], model: nn.Module, factory: Grouped) -> list[Optimizer]:
    """The optimisers of the stages; a tied parameter has its first name in all of them."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        stage_optimizer(
            factory,
            {first[id(p)]: p for p in stage.parameters() if p.requires_grad},
            trainable_shapes(model),
        )
        for stage in stages
    ]


def train(optimizers: Sequence[Optimizer], model: nn.Module, seed: int) -> None:
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.manual_seed(seed)
            parameter.grad = torch.randn(parameter.shape)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffer * 2 + (seed if "num" in name else 0.3 * seed))
    for optimizer in optimizers:
        optimizer.step()


cuts = st.sets(st.integers(1, LAYERS - 1), max_size=3).map(sorted)


@at_most(30)
@given(
    before=cuts,
    after=cuts,
    groups=st.integers(1, 4),
    drawn=st.lists(st.integers(-1, 3), min_size=len(NAMES), max_size=len(NAMES)),
    frozen=st.sets(st.sampled_from(NAMES), max_size=6),
    named=st.booleans(),
    make=st.sampled_from([partial(SGD, lr=0.1), partial(SGD, momentum=0.9), Adam, partial(AdamW, amsgrad=True)]),
)
def test_groups_keep_their_settings_and_state_however_the_model_is_cut(
    before: list[int], after: list[int], groups: int, drawn: list[int], frozen: set[str], named: bool, make: Any
) -> None:
    group_of = {name: min(number, groups - 1) for name, number in zip(NAMES, drawn, strict=True)}
    model, other = network(sorted(frozen), False), network(sorted(frozen), False)
    trainable = [shape.name for shape in trainable_shapes(model)]
    filled = {group_of[name] for name in trainable} == set(range(groups))
    factory = Grouped(make, group_of, groups, named and filled)  # torch wants names in all groups or in none
    stages = stages_of(model, before)
    chosen = optimizers_of(stages, model, factory)
    assert all(len(optimizer.param_groups) == groups for optimizer in chosen)
    train(chosen, model, 1)
    for optimizer in chosen:  # as a scheduler does
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.5 / (number + 1)
    states = [capture_state(stage, optimizer, GradientNorm()) for stage, optimizer in zip(stages, chosen, strict=True)]
    merged = merge_stages(states)
    others = stages_of(other, after)
    restored = optimizers_of(others, other, factory)
    for stage, optimizer in zip(others, restored, strict=True):
        restore_state(select_for_stage(merged, stage), stage, optimizer, GradientNorm())
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 / (n + 1) for n in range(groups)]
    train(chosen, model, 2)
    train(restored, other, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_each_stage_of_tied_parameters_has_them_in_the_group_of_their_first_name() -> None:
    model = network([], True)
    factory = Grouped(AdamW, {name: 1 if name == "0.weight" else 0 for name in NAMES}, 2, named=True)
    stages = stages_of(model, [2, 4])
    first, middle, last = optimizers_of(stages, model, factory)
    tied = model[0].weight
    assert first.param_groups[1]["params"] == [tied]
    assert last.param_groups[1]["params"] == [tied]
    assert middle.param_groups[1]["params"] == []
    assert first.param_groups[1]["param_names"] == ["0.weight"]
    assert middle.param_groups[0]["param_names"] == ["2.weight", "2.bias", "3.weight", "3.bias"]


VALUE = {"step": 3, "moments": [torch.ones(2), (torch.zeros(1), None)], "name": "x"}


def test_what_was_split_is_joined_again_under_other_names_too() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = split_tensors(VALUE, "optimizer/w", tensors)
    assert list(tensor_names_in(tree)) == ["optimizer/w/moments/0", "optimizer/w/moments/1/0"]
    assert join_tensors(tree, tensors)["moments"][1] == (torch.zeros(1), None)
    renamed = rename_tensors(tree, {"optimizer/w/moments/0": "other"})
    assert list(tensor_names_in(renamed)) == ["other", "optimizer/w/moments/1/0"]
    tensors["other"] = tensors.pop("optimizer/w/moments/0")
    assert torch.equal(join_tensors(renamed, tensors)["moments"][0], torch.ones(2))


def test_joined_tensors_are_copies() -> None:
    tensors = {"t": torch.zeros(2)}
    join_tensors({"tensor": "t"}, tensors).add_(1)
    assert not tensors["t"].any()


def test_a_tree_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown kind 'set'"):
        join_tensors({"set": []}, {})
