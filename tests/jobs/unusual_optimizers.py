"""Optimisers that look at all parameters together, or at more than each parameter's gradient."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim


class Own(optim.Optimizer):
    """An optimiser with the settings that its subclasses need."""

    def __init__(self, params: Any, lr: float = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @property
    def all(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        factor = self.factor()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * factor)

    def factor(self) -> float:
        return 1.0


def norm_of(tensors: Iterable[Tensor | None]) -> float:
    return float(nn.utils.get_total_norm([tensor for tensor in tensors if tensor is not None]))


def squares_of(parameters: Iterable[nn.Parameter]) -> float:
    return norm_of(p.grad for p in parameters) ** 2


class ClipsInside(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class ClipsAboveMillions(Own):
    """As LAMB does it, without writing into the gradients; and far from where gradients most often are."""

    def factor(self) -> float:
        return min(1.0, 1e5 / (norm_of(p.grad for p in self.all) + 1e-6))


class Normalised(Own):
    def factor(self) -> float:
        return 1 / (norm_of(p.grad for p in self.all) + 1e-6)


class TrustRatio(Own):
    """LARS with one ratio for all parameters."""

    def factor(self) -> float:
        return norm_of(p.detach() for p in self.all) / (norm_of(p.grad for p in self.all) + 1e-9)


class LongWarmUp(Own):
    """Looks at other parameters from its tenth step on."""

    def factor(self) -> float:
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        return 1.0 if group["steps"] < 10 else 1 / (1e-3 + norm_of(p.grad for p in self.all))


class Counted(Own):
    """Divides the rate among the parameters of a group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / max(1, len(group["params"]))
        return super().step(closure)


class Neighbours(Own):
    """Adds to each update a little of the update of the parameter before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = 0.0
        for p in self.all:
            assert p.grad is not None
            p.sub_(p.grad + 0.1 * before, alpha=self.param_groups[0]["lr"])
            before = float(p.grad.mean())


class SharedMoment(Own):
    """Keeps one second moment for all parameters, with the first of them."""

    def factor(self) -> float:
        state = self.state[self.all[0]]
        state["moment"] = 0.9 * float(state.get("moment", 0.0)) + 0.1 * squares_of(self.all)
        return 1.0 / (math.sqrt(state["moment"]) + 1e-8)


class Prodigy(Own):
    """Mishchenko & Defazio 2023, without weight decay: the rate is found from all parameters together."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-6, d_max=1e-6, numerator=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]
        d, beta_1, beta_2, beta_3 = first["d"], 0.9, 0.999, 0.999**0.5
        numerator, denominator = first["numerator"] * beta_3, 0.0
        for p in self.all:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["start"] = p.clone()
                for name in ("s", "m", "v"):
                    state[name] = torch.zeros_like(p)
            numerator += d / 1e-6 * d * float((p.grad * (state["start"] - p)).sum())
            state["m"].mul_(beta_1).add_(p.grad, alpha=d * (1 - beta_1))
            state["v"].mul_(beta_2).addcmul_(p.grad, p.grad, value=d * d * (1 - beta_2))
            state["s"].mul_(beta_3).add_(p.grad, alpha=d / 1e-6 * d)
            denominator += float(state["s"].abs().sum())
        if denominator > 0:
            first["d_max"] = max(first["d_max"], numerator / denominator)
        first["numerator"], first["d"] = numerator, first["d_max"]
        for p in self.all:
            p.addcdiv_(self.state[p]["m"], self.state[p]["v"].sqrt().add_(d * 1e-8), value=-d)


class DAdaptSGD(Own):
    """Defazio & Mishchenko 2023, without momentum."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-6, numerator=0.0, g0=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]
        first["g0"] = first["g0"] or squares_of(self.all) ** 0.5
        rate, sums = first["d"] * first["lr"] / (first["g0"] or 1.0), 0.0
        for p in self.all:
            assert p.grad is not None
            s = self.state[p].setdefault("s", torch.zeros_like(p))
            first["numerator"] += rate * float((p.grad * s).sum())
            s.add_(p.grad, alpha=rate)
            sums += float(s.square().sum())
            p.sub_(p.grad, alpha=rate)
        if sums:
            first["d"] = max(first["d"], 2 * first["numerator"] / sums**0.5)


class Watches(Own):
    """Keeps a mean of the norms of all gradients, to use it much later."""

    def factor(self) -> float:
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        group["mean"] = 0.9 * group.get("mean", 0.0) + 0.1 * norm_of(p.grad for p in self.all)
        return 1.0 if group["steps"] < 100 else 1 / (1e-3 + float(group["mean"]))


class Perturbs(Own):
    """As SAM without a second forward: goes up along the whole gradient, and back in the next step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.all:
            p.sub_(self.state[p].get("up", torch.zeros_like(p)))
        super().step(closure)
        scale = 0.05 / (norm_of(p.grad for p in self.all) + 1e-9)
        for p in self.all:
            assert p.grad is not None
            self.state[p]["up"] = p.grad * scale
            p.add_(self.state[p]["up"])


class FirstOfAll(Own):
    """Counts its steps with the first parameter of the first group."""

    def factor(self) -> float:
        state = self.state[self.param_groups[0]["params"][0]]
        state["steps"] = state.get("steps", 0) + 1
        return 1 / float(state["steps"])


class CountsGroups(Own):
    """Counts once for each group that holds something."""

    def factor(self) -> float:
        for group in self.param_groups:
            if group["params"]:
                self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return 1 / float(self.param_groups[0]["steps"])


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)
