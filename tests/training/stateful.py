"""Modules whose forwards leave something for the next ones, in all the ways that there are."""

from collections import deque

import torch
from torch import Tensor, nn


class Counting(nn.Module):
    """Does something else after three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """A layer, with an activation at first."""
        self.calls += 1
        y: Tensor = self.linear(x)
        return y if self.calls > 3 else torch.tanh(y)


class Cooling(nn.Module):
    """Divides by a temperature that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """`x` by the temperature."""
        self.temperature *= 0.97
        return x / self.temperature


class Recurrent(nn.Module):
    """Begins with the state that the batch before has left."""

    def __init__(self, *, detach: bool = True) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.state: tuple[Tensor, Tensor] | None = None
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        """The cell's output."""
        state = self.cell(x, self.state)
        self.state = (state[0].detach(), state[1].detach()) if self.detach else state
        output: Tensor = state[0]
        return output


class Remembering(nn.Module):
    """Adds the mean of the last three batches, and keeps a list of all means."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[Tensor] = deque(maxlen=3)
        self.means: list[float] = []
        self.seen = {"batches": 0, ("key", 1): None}

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the mean of the last batches."""
        self.last.append(x.detach().mean(0))
        self.means.append(float(x.detach().mean()))
        self.seen["batches"] += 1  # type: ignore[operator]
        return x + torch.stack(list(self.last)).mean(0)


class Averaging(nn.Module):
    """Multiplies by a moving average in a buffer, which it changes in place after autograd has saved it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the average."""
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.abs().mean(0))
        return x * self.average


class Observing(nn.Module):
    """Keeps what it has computed last, for its user to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attention: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x`, weighted."""
        self.attention = torch.softmax(self.linear(x), -1)
        return x * self.attention


class Caching(nn.Module):
    """Keeps a table for each shape that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """`x` and its table."""
        if x.shape not in self.tables:
            self.tables[x.shape] = torch.arange(4.0).cos().expand(x.shape)
        return x + self.tables[x.shape]


class AddingMean(nn.Module):
    """Adds the mean of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x`, and what the last forward has left."""
        before = torch.zeros(4) if self.last is None else self.last
        self.last = x.detach().mean(0)
        return x + before


def model() -> nn.Module:
    """All of them, always with the same weights."""
    torch.manual_seed(3)
    parts = (Counting(), Cooling(), Recurrent(), Averaging(), Remembering(), Observing(), Caching())
    return nn.Sequential(nn.Linear(4, 4), *parts, nn.BatchNorm1d(4), nn.Linear(4, 3))
