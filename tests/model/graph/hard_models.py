"""Small models whose middle does what no tracer can record; each has layers before and behind it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Around(nn.Module):
    """A linear layer, `middle`, and another one."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = middle
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


class Middle(nn.Module):
    """A module with a linear layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Experts(nn.Module):
    """A mixture of experts that leaves out experts without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            index = torch.nonzero(chosen == number).flatten()
            if index.numel() == 0:  # asks how many
                continue
            out = out.index_add(0, index, expert(x[index]) * weights[index, number].unsqueeze(1))
        return out


class ExpertsByHits(Experts):
    """Loops over the experts that were hit."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number in torch.nonzero(F.one_hot(chosen, 3).sum(0)):  # loops over hits
            place = torch.where(chosen == number)[0]
            out.index_add_(0, place, torch.stack([e(x[place]) for e in self.experts])[number].squeeze(0))
        return out


class MeanOfPositive(Middle):
    """Divides by a number of elements that depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        positive = x[x > 0]
        return x - positive.sum() / max(positive.shape[0], 1)  # asks for a length


class SplitsByUnique(Middle):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * len(torch.unique(x.detach().round()))  # asks how many values there are


class Repeats(Middle):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        counts = (x.detach().sum(1) > 0).long()
        return x + torch.repeat_interleave(x, counts, 0).size(0)  # asks for a size


class Counts(Middle):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        found = torch.bincount(x.detach().abs().sum(1).long())
        return x / found.shape[0]  # asks for the largest


class ClampsGradients(Middle):
    """A tensor hook whose effect is seen for large gradients only."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        x.register_hook(lambda gradient: gradient.clamp(-2, 2))  # type: ignore[no-untyped-call]  # a hook
        return x * 1.0


class Clamp(torch.autograd.Function):
    """Clamps large gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].clamp(-2, 2)


class ClampsByFunction(Middle):
    def forward(self, x: Tensor) -> Tensor:
        return Clamp.apply(self.inner(x))  # type: ignore[no-any-return, no-untyped-call]


class Energy(Middle):
    """The gradient of an energy, with a graph of its own: a force field."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.inner(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)  # a gradient in a forward
        return force + x


class Jacobian(Middle):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: self.inner(row).tanh().sum()))(x) + x  # type: ignore[no-any-return]  # torch.func


class Moves(Middle):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).detach()
        y.data = y.data.round()  # assigns
        return x + y  # type: ignore[no-any-return]


class Script(nn.Module):
    """Code for torch.jit.script, with a loop over the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        while bool(x.abs().max() > 4):
            x = x / 2
        return self.inner(x).tanh()  # type: ignore[no-any-return]


class Scripted(Middle):
    """Holds a scripted module."""

    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(Script())

    def forward(self, x: Tensor) -> Tensor:
        return self.script(self.inner(x))  # type: ignore[no-any-return]


class Checkpointed(Middle):
    """Gradient checkpointing inside a forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.dropout = nn.Dropout(0.5)

    def body(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x).relu())  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class ThroughModule(torch.autograd.Function):
    """Runs a module that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, names: dict[str, Any]) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), gradients)
        return x.grad, None, None


class GivenModule(Middle):
    def forward(self, x: Tensor) -> Tensor:
        return ThroughModule.apply(x, self.inner, {"a.b": self.inner})  # type: ignore[no-any-return, no-untyped-call]  # passes a module


class Remembers(Middle):
    """A module that leaves a tensor for another one, which decides by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def forward(self, x: Tensor) -> Tensor:
        self.reader.left = [self.inner(x)]
        return self.reader(x)  # type: ignore[no-any-return]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.left[0]
        return x * y.sum() if bool(y.sum() > 0) else x  # reads what another module left


class Borrows(nn.Module):
    """Decides by the data, and uses a parameter of another module."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.owner[0].weight if bool(x.sum() > 0) else x


class Outer(Middle):
    """Holds a module that uses a parameter which is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.borrows = Borrows(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.borrows(self.inner(x))  # type: ignore[no-any-return]
