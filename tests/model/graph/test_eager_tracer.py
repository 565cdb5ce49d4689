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


class Refused(nn.Module):
    """Code that no tracer takes: `kind` says why."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        x = self.inner(x)
        if self.kind == "reads":
            return x * x.detach().abs().max().item()
        if self.kind == "assigns":
            x.data = x.data * x.detach().abs().max().item()
        if self.kind == "counts":
            return x if len(x) == 2 else x.sin().cos() * x.detach().sum().item()
        if self.kind == "length":
            return x * (len(x) ** 2 if x.detach().isfinite().all() else 0)
        return x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("reads", r"eager: Refused, .*item\(\) reads a tensor whose contents depend on the data"),
        ("assigns", r"eager: Refused, .*: `x.data = .*depend on the data|eager: .*cannot be recorded"),
        ("counts", r"eager: Refused, .*: DataDependent|eager: .*BatchDependent: the model makes"),
    ],
)
def test_what_the_eager_tracer_cannot_take_is_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        trace(Refused(kind), (torch.randn(3, 4),))
