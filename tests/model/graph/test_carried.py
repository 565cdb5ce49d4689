"""Attributes and buffers that a forward leaves for the next one: found, kept in blocks, or refused with a way out."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from tests.model.graph.check import check, total
from tests.model.split.chain import even_bounds, run_chain
from tests.training import stateful


def between(*parts: nn.Module) -> nn.Sequential:
    """`parts` with layers around them."""
    return nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 4))


def assert_several_forwards_are_as_in_one_process(model: nn.Module, stages: int = 3) -> None:
    graph, plain = trace(model, (torch.randn(2, 4),)), copy.deepcopy(model)
    pieces = split(graph, even_bounds(len(graph.layers), min(stages, len(graph.layers))))
    for _ in range(6):
        x = torch.randn(2, 4)
        assert torch.equal(run_chain(pieces, graph.signature.bind((x,), {}), total), plain(x))


@pytest.mark.parametrize(
    "part", [stateful.Counting, stateful.Cooling, stateful.Recurrent, stateful.Remembering, stateful.Averaging]
)
def test_what_a_forward_leaves_reaches_the_next_one(part: Callable[[], nn.Module]) -> None:
    model = between(part(), part())
    assert trace(model, (torch.randn(2, 4),)).carried.names
    assert_several_forwards_are_as_in_one_process(model)


@pytest.mark.parametrize("part", [stateful.Observing, stateful.Caching])
def test_attributes_that_are_written_anew_or_never_change_again_are_no_concern(part: Callable[[], nn.Module]) -> None:
    model = between(part())
    held = dict(vars(model[1]))
    graph = check(model, (torch.randn(3, 4),))
    assert graph.carried.names == ()
    assert graph.notes == ()
    assert dict(vars(model[1])) == held
    assert_several_forwards_are_as_in_one_process(model)


def test_an_observer_behind_a_counter_stays_no_concern() -> None:
    assert trace(between(stateful.Counting(), stateful.Observing()), (torch.randn(2, 4),)).carried.names == ("1.calls",)


def test_what_does_not_matter_before_training_is_kept_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), stateful.AddingMean(), nn.Linear(4, 4))
    assert trace(model, (torch.randn(2, 4),)).carried.names[0] == "2.last"
    bias = model[1].bias
    assert isinstance(bias, nn.Parameter)
    nn.init.ones_(bias)
    assert_several_forwards_are_as_in_one_process(model)


class Counted(nn.Module):
    """Counts in a buffer, and decides by it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A layer, with an activation at first."""
        self.calls += 1
        y: Tensor = self.linear(x)
        return y if self.calls > 3 else torch.tanh(y)


def test_a_choice_by_a_buffer_that_changes_is_not_frozen() -> None:
    assert_several_forwards_are_as_in_one_process(between(Counted()))


class Twice(nn.Module):
    """Calls the same module at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.cooling = stateful.Cooling()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Four layers."""
        x = self.layers[1](self.cooling(self.layers[0](x)))
        return self.layers[3](self.cooling(self.layers[2](x)))  # type: ignore[no-any-return]


def test_layers_between_two_calls_of_one_module_stay_together() -> None:
    graph = trace(Twice(), (torch.randn(2, 4),))
    assert [layer.name for layer in graph.layers] == ["layers.0", "cooling", "layers.3"]
    assert_several_forwards_are_as_in_one_process(Twice())


class Child(nn.Module):
    """Scales by a number of its own."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the number of calls."""
        self.seen.append(1.0)
        return x * len(self.seen)


class Pair(nn.Module):
    """Two modules with one list."""

    def __init__(self) -> None:
        super().__init__()
        seen: list[float] = []
        self.first, self.second = Child(seen), Child(seen)

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_modules_that_share_what_changes_become_one_block() -> None:
    model = between(Pair())
    assert trace(model, (torch.randn(2, 4),)).carried.blocks == ("1",)
    assert_several_forwards_are_as_in_one_process(model)


class Own(nn.Module):
    """The model's own code uses what changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """A layer by a temperature."""
        self.temperature *= 0.9
        y: Tensor = self.linear(x)
        return y / self.temperature


class OwnBuffer(Own):
    """The same in a buffer."""

    heat: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """A layer by a temperature."""
        self.heat.mul_(0.9)
        y: Tensor = self.linear(x)
        return y / self.heat


class Reading(nn.Module):
    """Reads what its submodule changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.counting = stateful.Counting()

    def forward(self, x: Tensor) -> Tensor:
        """A layer, times the number of calls."""
        return self.counting(self.linear(x)) * self.counting.calls  # type: ignore[no-any-return]


class OfClass(nn.Module):
    """Counts the calls of all instances."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the number of calls."""
        type(self).calls += 1
        return x * type(self).calls


class Meter:
    """An object that counts."""

    def __init__(self) -> None:
        self.count = 0


class Metering(nn.Module):
    """Counts in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the number of calls."""
        self.meter.count += 1
        return x * self.meter.count


class CountingBackward(nn.Module):
    """Changes what it does by the number of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 1

    def forward(self, x: Tensor) -> Tensor:
        """`x` by the number of backwards."""
        y = x / self.calls
        y.register_hook(self.count)  # type: ignore[no-untyped-call]
        return y

    def count(self, gradient: Tensor) -> None:
        """Called in the backward."""
        self.calls += 1


class Growing(nn.Module):
    """Hooks itself at every call."""

    def forward(self, x: Tensor) -> Tensor:
        """`x`, doubled by each call so far."""
        self.register_forward_hook(lambda module, args, output: output * 2)
        return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            between(stateful.Recurrent(detach=False)),
            r"1\.state .*: it holds a tensor with its autograd history.*detach",
        ),
        (between(OfClass()), r"of 1 \(OfClass\) changes 1\.OfClass\.calls .*attribute of the module, in __init__"),
        (between(Metering()), r"changes 1\.meter .*`self\.meter\.count \+= 1`|it holds a Meter, .*keep numbers"),
        (between(CountingBackward()), r"the backward pass of 1 \(CountingBackward\) changes 1\.calls .*in the forward"),
        (between(Growing()), r"it changes hooks, .*before training"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, nn.Module) else "",
)
def test_what_cannot_be_kept_is_refused_with_its_place_and_a_way_out(model: nn.Module, reason: str) -> None:
    held = repr([{n: v for n, v in vars(part).items() if not isinstance(v, dict)} for part in model.modules()])
    with pytest.raises(ModelError, match=reason):
        trace(model, (torch.randn(2, 4),))
    assert repr([{n: v for n, v in vars(part).items() if not isinstance(v, dict)} for part in model.modules()]) == held


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (
            Own(),
            r"one layer, as its own code uses temperature \(.*test_carried\.py:\d+: `self\.temperature \*= 0\.9`\)",
        ),
        (Reading(), r"own code uses counting\.calls \(.*`return self\.counting\(.*\. To divide it, move that code"),
        (Pair(), r"leaves first\.seen, second\.seen for the next one; .* uses an object that modules share"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, nn.Module) else "",
)
def test_a_model_whose_own_code_uses_what_changes_runs_whole_and_says_why(model: nn.Module, note: str) -> None:
    graph = trace(model, (torch.randn(2, 4),))
    assert (len(graph.layers), graph.carried.blocks) == (1, ("",))
    assert any(re.search(note, text) for text in graph.notes), graph.notes
    assert_several_forwards_are_as_in_one_process(model)


def test_the_ways_out_that_notes_and_refusals_name() -> None:
    for model in (OwnBuffer(), between(Own()), between(stateful.Recurrent()), between(Reading())):
        assert trace(model, (torch.randn(2, 4),)).carried.blocks != ("",)
        assert_several_forwards_are_as_in_one_process(model)


def test_spectral_normalisation_trains_with_one_replica() -> None:
    normalised: Any = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(normalised(nn.Linear(4, 4)), nn.ReLU(), normalised(nn.Linear(4, 4)))
    assert len(trace(model, (torch.randn(2, 4),)).carried.buffers) == 4
    assert_several_forwards_are_as_in_one_process(model)
