"""Jobs composed of parts that lie around a model, each right in plain PyTorch: equal over functions, or refused."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.errors import InputError
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference

WIDTH, CLASSES = 24, 3


class Running(nn.BatchNorm1d):
    """Normalises by its running statistics, as Batch Renormalisation nearly does, and keeps them as BatchNorm."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        assert mean is not None
        assert variance is not None
        scale = torch.rsqrt(variance.detach().clone() + self.eps)
        shifted = (x - mean.detach().clone()) * scale
        super().forward(x)
        return shifted


class InChannels(nn.Module):
    """A norm over channels of a few elements each."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(x.view(len(x), 4, 6))
        return normalised.flatten(1)


NORMS: Mapping[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "layer": lambda: nn.LayerNorm(WIDTH),
    "group": lambda: nn.GroupNorm(4, WIDTH),
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative batch": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "untracked batch": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "instance": lambda: InChannels(nn.InstanceNorm1d(4, affine=True)),
    "tracked instance": lambda: InChannels(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    "by running statistics": lambda: Running(WIDTH),
}
COUPLING = frozenset({"batch", "cumulative batch", "untracked batch", "by running statistics", "tracked instance"})
"""Norms by which a step depends on how its batch is cut: what they compute, or the statistics that they keep."""


class Network(nn.Module):
    """Residual blocks and a head; `frozen` puts its first block into eval mode whatever train() says."""

    def __init__(self, norm: Callable[[], nn.Module], *, frozen: bool = False) -> None:
        super().__init__()
        bias = norm is nn.Identity  # the gradient of one ahead of a norm is nothing but rounding
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), norm(), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.frozen = frozen
        if frozen:
            self.blocks[0].requires_grad_(False)

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        if self.frozen:
            self.blocks[0].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(x)
        return output


class Margin(nn.Module):
    """A loss with centres of its own, which are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(output) @ F.normalize(self.centres).T * 4, target)


class Counting(nn.Module):
    """A loss whose temperature falls with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output / (1 + 0.5 / self.calls), target)


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """A loss that compares every sample of the batch with every other one."""
    rows = F.normalize(output, dim=1)
    return F.cross_entropy(rows @ rows.roll(1, 0).T / 0.2, torch.arange(len(rows)))


def dice(output: Tensor, target: Tensor) -> Tensor:
    """Overlap over the whole batch."""
    chosen, wanted = output.softmax(1)[:, 1], (target == 1).to(output.dtype)
    return 1 - 2 * (chosen * wanted).sum() / (chosen.sum() + wanted.sum())


def ranking(output: Tensor, target: Tensor) -> Tensor:
    """Samples of higher classes before those of lower ones; not by a score that a bias shifts for all alike."""
    scores, pairs = output.square().sum(1), target[:, None] > target[None]
    return (F.softplus(scores[None] - scores[:, None]) * pairs).sum() / pairs.sum().clamp(min=1)


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over samples that count, and how many do."""
    counts = target != 0
    return (F.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum()


def with_penalty(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that holds the model, for a penalty on its weights."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (
            F.cross_entropy(output, target) + 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        )

    return loss


Loss = Callable[[nn.Module], Any]
LOSSES: Mapping[str, tuple[Loss, Mapping[str, Any]]] = {
    "mean": (lambda model: F.cross_entropy, {}),
    "smoothed": (lambda model: nn.CrossEntropyLoss(label_smoothing=0.1), {}),
    "class weights": (lambda model: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0])), {}),
    "ignored class": (lambda model: nn.CrossEntropyLoss(ignore_index=0), {}),
    "sum": (lambda model: nn.CrossEntropyLoss(reduction="sum"), {}),
    "weighted": (lambda model: weighted, {"reduction": "weighted"}),
    "contrast": (lambda model: contrast, {}),
    "contrast, cached": (lambda model: contrast, {"coupled": "cache"}),
    "dice, cached": (lambda model: dice, {"coupled": "cache"}),
    "ranking, cached": (lambda model: ranking, {"coupled": "cache"}),
    "own state, cached": (lambda model: Counting(), {"coupled": "cache"}),
    "own parameters": (lambda model: Margin(), {}),
    "own state": (lambda model: Counting(), {}),
    "penalty on weights": (with_penalty, {}),
}


class ClipsInside(torch.optim.SGD):
    """Clips the norm of all its gradients in its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class GlobalRate(torch.optim.SGD):
    """Its rate depends on the distance that all parameters have gone together, as D-Adaptation's does."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum().sqrt().item()
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.05 / (1 + size))
        return None


def by_kind(parameters: Any) -> torch.optim.Optimizer:
    """Groups by the number of dimensions."""
    known = list(parameters)
    flat = {"params": [p for p in known if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([flat, {"params": [p for p in known if p.dim() > 1], "weight_decay": 0.1}], lr=1e-3)


OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "momentum": (partial(torch.optim.SGD, lr=0.05, momentum=0.9), {}),
    "RMSprop": (partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3), {}),
    "groups": (by_kind, {}),
    "clipped": (partial(torch.optim.SGD, lr=0.5), {"clip_grad_norm": 0.1}),
    "clips inside": (partial(ClipsInside, lr=0.5), {}),
    "global": (GlobalRate, {}),
}


def masked(model: Network) -> None:
    """Leave some rows of the head as they are."""
    mask = torch.tensor([[1.0], [0.0], [1.0]])
    model.head.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]


def bounded(model: Network) -> None:
    """Bound the elements of a gradient, which is not linear."""
    model.blocks[1][0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[index]


def collected(model: Network) -> None:
    """Collect gradients in a list outside."""
    kept: list[Tensor] = []
    model.head.bias.register_hook(lambda gradient: kept.append(gradient.clone()))  # type: ignore[no-untyped-call]


def stepped(model: Network) -> None:
    """Step one parameter as soon as its gradient is there."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    model.head.bias.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


HOOKS: Mapping[str, Callable[[Network], None]] = {
    "none": lambda model: None,
    "masked": masked,
    "bounded": bounded,
    "collected": collected,
    "stepped": stepped,
}
MODES = ("as made", "frozen by train()", "eval by hand", "all in eval")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parts of one job, by name, and how it is cut."""

    loss: str = "mean"
    optimizer: str = "momentum"
    hook: str = "none"
    norm: str = "none"
    mode: str = "as made"
    stages: int = 2
    replicas: int = 1
    micro_batch: int = 4
    samples: int = 40
    epochs: int = 1
    recompute: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether a global batch is more than one micro-batch."""
        return self.micro_batch < 16

    def script(self) -> Script:
        """The job as a user's script."""
        make_loss, loss_keywords = LOSSES[self.loss]
        optimizer, keywords = OPTIMIZERS[self.optimizer]

        def make() -> tuple[nn.Module, Any]:
            model = Network(NORMS[self.norm], frozen=self.mode == "frozen by train()")
            model.double()  # so that rounding is nothing beside 1e-4 of an update
            HOOKS[self.hook](model)
            model.train()
            if self.mode == "eval by hand":
                model.blocks[1].eval()
            if self.mode == "all in eval":
                model.eval()
            loss = make_loss(model)
            return model, loss.double() if isinstance(loss, nn.Module) else loss

        def enter(model: nn.Module) -> None:
            model.train()
            if self.mode == "eval by hand":
                model.blocks[1].eval()  # type: ignore[index, union-attr]

        def clip(parameters: list[nn.Parameter]) -> None:
            if self.optimizer == "clipped":
                nn.utils.clip_grad_norm_(parameters, 0.1)

        return Script(
            make=make,
            enter=enter,
            before_step=clip,
            samples=self._samples,
            optimizer=optimizer,
            micro_batch=self.micro_batch,
            epochs=self.epochs,
            recipe={**loss_keywords, **keywords},
        )

    def _samples(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [
            (torch.randn(WIDTH, generator=generator).double(), torch.tensor(i % CLASSES)) for i in range(self.samples)
        ]


def drawn(draw: random.Random) -> Job:
    """A job of which each part is as likely ordinary as not."""

    def part(ordinary: str, kinds: Iterable[str]) -> str:
        return draw.choice([ordinary, draw.choice(sorted(kinds))])

    replicas = draw.choice([1, 1, 2])
    return Job(
        loss=part("mean", LOSSES),
        optimizer=part("momentum", OPTIMIZERS),
        hook=part("none", HOOKS),
        norm=part("none", NORMS),
        mode=part("as made", MODES),
        stages=draw.randint(1, 4),
        replicas=replicas,
        micro_batch=draw.choice([2, 4, 8] if replicas > 1 else [2, 4, 8, 16]),
        samples=draw.choice([32, 40, 45]),
        epochs=draw.choice([1, 2]),
        recompute=draw.random() < 0.5,
    )


def reference(job: Job) -> nn.Module:
    """What the job trains in plain PyTorch: on whole batches, or on micro-batches where its norm depends on these."""

    def mean(found: Any) -> Any:
        return found[0] / found[1] if isinstance(found, tuple) else found

    return run_script(job.script(), loss_of=mean, cut=job.norm in COUPLING)[0]


class Wrong(AssertionError):
    """A job trains otherwise than plain PyTorch."""


def outcome(job: Job) -> str:
    """What became of the job: "equal", or by which error it is refused. Raises Wrong, and whatever else goes wrong."""
    script = job.script()
    try:
        found = run_over_functions(script, stages=job.stages, replicas=job.replicas, recompute=job.recompute)
    except InputError as error:
        return f"refused by {type(error).__name__}: {error}"
    difference, name = worst_difference(script, found, reference(job))
    if difference > EQUAL:
        raise Wrong(f"{name} is off by {difference:.1e}")
    return "equal"
