"""Tracing leaves a model as it was: what its code changes in place, too."""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.model.graph.isolation import preserve_state
from tests.model.graph.check import check


class Notes:
    """An ordinary object that a model keeps."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Hoarder(nn.Module):
    """Changes everything that it holds in place."""

    rooms: list[int] = []  # noqa: RUF012 - shared by all instances, on purpose

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.items = [1, [2]]
        self.names = {"a": {"b": 1}}
        self.order = OrderedDict(x=1, y=2)
        self.members = {1, 2}
        self.last = deque([1, 2], maxlen=2)
        self.notes = Notes()
        self.tensor = torch.zeros(3)
        self.hidden = [nn.Linear(2, 2)]
        seen: list[int] = []
        self.linear.register_forward_hook(lambda module, args, output: seen.append(1))
        self.seen_by_hook: Callable[[], list[int]] = lambda: seen

    def forward(self, x: Tensor) -> Tensor:
        """Change all of it."""
        self.items.append(3)
        self.items[1].append(4)  # type: ignore[attr-defined]
        self.names["a"]["c"] = 2
        self.order.move_to_end("x")
        self.members.add(3)
        self.last.append(3)
        self.notes.seen.append(1)
        self.tensor.add_(1)
        self.hidden[0].used = True  # type: ignore[assignment]
        self.rooms.append(1)
        type(self).rooms = [*self.rooms]
        self.new = x
        self.register_forward_hook(lambda module, args, output: None)
        output: Tensor = self.linear(x)
        return output


def contents(model: Hoarder) -> Any:
    """The state of `model`, as a copy."""
    held = (model.items, model.names, list(model.order), model.members, model.last, vars(model.notes), model.rooms)
    return copy.deepcopy((held, model.tensor, model.seen_by_hook(), list(vars(model.hidden[0])), list(vars(model))))


def test_all_that_a_forward_changes_in_place_is_put_back_into_the_same_objects() -> None:
    model = Hoarder()
    before: Any = repr(contents(model))
    held = {name: id(item) for name, item in vars(model).items()}
    rooms = Hoarder.rooms
    with preserve_state(model):
        model(torch.ones(2, 4))
        assert repr(contents(model)) != before
    assert repr(contents(model)) == before
    assert {name: id(item) for name, item in vars(model).items()} == held
    assert not model._forward_hooks
    assert Hoarder.rooms is rooms


class HookedOnFirstUse(nn.Module):
    """Records what its layers return by hooks that the first forward installs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.hooked = False
        self.recorded: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and the sum of all layers' outputs."""
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.recorded.append(output))
            self.hooked = True
        self.recorded.clear()
        for layer in self.layers:
            x = layer(x)
        return x, torch.stack(self.recorded).sum(0)


def test_hooks_that_a_forward_installs_work_in_stages_and_leave_the_model() -> None:
    model, x = HookedOnFirstUse(), torch.randn(3, 4)
    expected = copy.deepcopy(model)(x)[1]
    graph = check(model, (x,))
    assert len(graph.layers) > 3
    assert not model.hooked
    assert not any(layer._forward_hooks for layer in model.layers)
    assert torch.equal(model(x)[1], expected)
    assert torch.equal(model(x)[1], expected)


def test_transformers_that_record_hidden_states_are_traced() -> None:
    import transformers  # takes seconds, and others are collected without it

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config)
    inputs = {"input_ids": torch.randint(0, 32, (2, 6)), "output_hidden_states": True, "use_cache": False}
    hooks = {name: list(module._forward_hooks) for name, module in model.named_modules()}
    expected = copy.deepcopy(model)(**inputs).hidden_states
    graph = check(model, (), inputs, loss=lambda output: output.logits.sum() + output.hidden_states[1].sum())
    assert len(graph.layers) > 8
    assert {name: list(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert len(model(**inputs).hidden_states) == len(model(**inputs).hidden_states) == len(expected) == 3


def test_tracing_twice_gives_the_same_graph() -> None:
    model = HookedOnFirstUse()
    names = [[layer.name for layer in trace(model, (torch.ones(2, 4),)).layers] for _ in range(2)]
    assert names[0] == names[1]
