"""What the eager tracer records, of code that the other tracers cannot take."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
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


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Assigns(), "DataDependent: an assignment to .data cannot be recorded"),
        (CallsMore(), "BatchDependent: the model makes 4 calls for 2 samples, but 5 for 3"),
        (CallsOther(), "BatchDependent: the model calls cos for 2 samples, but sin for 3"),
        (TakesLonger(), "BatchDependent: an argument is longer for 3 samples than for 2"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_reason(model: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=f"eager: .*{reason}"):
        trace(model, (torch.randn(3, 4),))


def test_a_flag_may_follow_the_batch_size() -> None:
    with pytest.raises(ModelError, match=r"eager: .*BatchDependent: False for 2 samples becomes True for 3"):
        trace(Switches(), (torch.randn(3, 4),))
