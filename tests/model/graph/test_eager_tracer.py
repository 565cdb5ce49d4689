"""The records of the eager tracer, of code that the other tracers cannot take."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.graph.check import check


class Doubled(torch.autograd.Function):
    """Doubles forward, and triples the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3


class Eager(nn.Module):
    """Results with several tensors, constants, numbers that follow from the batch size, an operation of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 4)
        self.weights = torch.linspace(0, 1, 4)

    def forward(self, x: Tensor) -> Any:
        count = int(torch.ones(len(x)).sum())  # a number that fx and torch.export cannot follow
        y, (h, _) = self.rnn(x)
        values, places = y.max(1)
        low, high = values.chunk(2, -1)
        y = torch.cat([high * (1 / count), low * (count / 4)], -1) + h[-1] * self.weights
        y = Doubled.apply(self.head(y))  # type: ignore[no-untyped-call]
        y[:, 0] = 1.5
        return y, places, count


def test_every_kind_of_call_is_recorded() -> None:
    graph = check(Eager(), (torch.randn(3, 5, 3),), shorter=((torch.randn(2, 5, 3),), {}))
    assert graph.tracer == "eager"
    assert [layer.name for layer in graph.layers] == ["rnn", "head"]


class Two(nn.Module):
    """Two layers; what happens between them is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def between(self, x: Tensor, count: int) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        count = int(torch.ones(len(x)).sum())  # a number that fx and torch.export cannot follow
        return self.b(self.between(self.a(x), count))


@torch.library.custom_op("funcpipe_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


torch.library.register_autograd("funcpipe_tests::halved", lambda context, gradient: gradient / 2)


class CallsOperator(Two):
    def between(self, x: Tensor, count: int) -> Any:
        return torch.ops.funcpipe_tests.halved(x) * count


class Assigns(Two):
    def between(self, x: Tensor, count: int) -> Any:
        x = x.detach()
        x.data = x.data * count
        return x


class CallsMore(Two):
    def between(self, x: Tensor, count: int) -> Any:
        return x.sin() if count > 2 else x


class CallsOther(Two):
    def between(self, x: Tensor, count: int) -> Any:
        return x.sin() if count > 2 else x.cos()


class TakesLonger(Two):
    def between(self, x: Tensor, count: int) -> Any:
        return torch.cat([x] * count)[: len(x)]


class Switches(Two):
    def between(self, x: Tensor, count: int) -> Any:
        return torch.sum(x, 1, keepdim=count > 2).view(-1, 1).expand(-1, 4).reshape(-1, 4)


def test_operators_with_a_backward_of_their_own_are_recorded_as_they_are_called() -> None:
    graph = check(CallsOperator(), (torch.randn(3, 4),))
    assert graph.tracer == "eager"
    (call,) = [node for node in graph.module.graph.nodes if "halved" in str(node.target)]
    assert call.target is torch.ops.funcpipe_tests.halved


REASONS = [
    (Assigns, "Unrecordable: an assignment to .data cannot be recorded"),
    (CallsMore, "b for 2 samples, but sin for 3"),
    (CallsOther, "BatchDependent: the model calls cos for 2 samples, but sin for 3"),
    (TakesLonger, "BatchDependent: an argument is longer for 3 samples than for 2"),
    (Switches, "BatchDependent: False for 2 samples becomes True for 3"),
]


@pytest.mark.parametrize(("kind", "reason"), REASONS)
def test_what_cannot_be_recorded_runs_whole_and_the_reason_is_given(kind: type[Two], reason: str) -> None:
    graph = check(kind(), (torch.randn(3, 4),), others=(torch.randn(1, 4), torch.randn(2, 4)))
    assert [layer.name for layer in graph.layers] == [kind.__name__]
    assert reason in graph.notes[0]
    assert f"{__file__}:" in graph.notes[0]


@pytest.mark.parametrize(("kind", "reason"), REASONS)
def test_inside_a_model_it_is_one_block(kind: type[Two], reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    graph = check(model, (torch.randn(3, 4),), others=(torch.randn(1, 4), torch.randn(2, 4)))
    assert [layer.name for layer in graph.layers] == ["0", "1", "2"]
    assert graph.notes[0].startswith(f"kept as one block each: 1: 1 ({kind.__name__}), {__file__}:")
    assert reason in graph.notes[0]


@dataclass
class Given:
    words: Tensor
    scale: float


class TakesDataclass(nn.Module):
    def forward(self, x: Tensor, given: Given) -> Tensor:
        return x * given.scale if bool(given.words.sum() > 0) else x + given.words


class PassesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = TakesDataclass()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.first(x), Given(x.square() - 0.5, 2.0)))
        return result


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.inner(x)
        return {"y": y, "z": -y if bool(x.sum() > 0) else 2 * y}


class ReadsLate(nn.Module):
    """Reads an item of what an early module returns only after a later one, and what that returns after the item."""

    def __init__(self) -> None:
        super().__init__()
        self.early = Chooses()
        self.late = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        pair, y = self.early(x), self.late(x)
        return pair["z"].sin() * (y / y.norm())


def test_what_is_read_late_of_an_early_result_takes_nothing_with_it() -> None:
    torch.manual_seed(0)
    graph = check(ReadsLate(), (torch.randn(3, 4),), others=(torch.randn(2, 4),))
    assert [layer.name for layer in graph.layers] == ["early", "late"]
    (norm,) = [i for i, layer in enumerate(graph.layers) for node in layer.nodes if node.target == "norm"]
    assert norm == 1


def test_blocks_are_given_dataclasses_that_hold_tensors() -> None:
    torch.manual_seed(0)
    graph = check(PassesDataclass(), (torch.randn(4, 4),), others=(torch.zeros(4, 4), 3 * torch.ones(4, 4)))
    assert [layer.name for layer in graph.layers] == ["first", "second", "last"]
