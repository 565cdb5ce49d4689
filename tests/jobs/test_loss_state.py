"""A loss with parameters, or with state that its calls change, trains as in a user's script, or is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import ScheduleKind
from funcpipe.errors import ModelError, PlanError
from tests.examples import in_long_run
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference
from tests.jobs.test_scripts import Residual, vectors


class Margin(nn.Module):
    """Centres of classes, which are trained, and a temperature in a module of its own."""

    def __init__(self, centres: int = 3) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(centres, 3))
        self.scale = nn.Linear(1, 1)
        self.weight: Tensor
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 1.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        similar = F.normalize(output) @ F.normalize(self.centres).T
        return F.cross_entropy(self.scale(similar.unsqueeze(-1)).squeeze(-1) * 4, target) / self.weight.mean()

    def of(self, output: Tensor, target: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.forward(output, target) * factor


def closure(margin: Margin) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: margin(output, target)


def temperature(output: Tensor, target: Tensor, *, log: Tensor) -> Tensor:
    return F.cross_entropy(output / log.exp(), target)


LOSSES: dict[str, Callable[[], Any]] = {
    "module": Margin,
    "partial": lambda: partial(Margin().of, factor=2.0),
    "method": lambda: Margin().of,
    "closure": lambda: closure(Margin()),
    "parameter": lambda: partial(temperature, log=nn.Parameter(torch.zeros(()))),
}


def parameters_of(loss: Any) -> list[nn.Parameter]:
    if isinstance(loss, nn.Module):
        return list(loss.parameters())
    if isinstance(loss, partial):
        return [loss.keywords["log"]] if "log" in loss.keywords else parameters_of(loss.func)
    if hasattr(loss, "__self__"):
        return list(loss.__self__.parameters())
    return list(loss.__closure__[0].cell_contents.parameters())


def trained_in_a_script(script: Script) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model and the parameters of the loss after the script, whose optimiser gets those of both."""
    model, loss = script.made()
    optimizer = script.optimizer([*model.parameters(), *parameters_of(loss)])
    samples = script.samples()
    for _ in range(script.epochs):
        for start in range(0, len(samples), script.global_batch):
            batch = samples[start : start + script.global_batch]
            optimizer.zero_grad()
            torch.autograd.backward(loss(model(torch.stack([x for x, _ in batch])), torch.stack([y for _, y in batch])))
            if "clip_grad_norm" in script.recipe:
                nn.utils.clip_grad_norm_([*model.parameters(), *parameters_of(loss)], script.recipe["clip_grad_norm"])
            optimizer.step()
    return model, parameters_of(loss)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("stages", "replicas"), [(3, 2), *in_long_run([(2, 1)])])
def test_parameters_of_a_loss_are_trained(kind: str, stages: int, replicas: int) -> None:
    clip = {"clip_grad_norm": 0.5} if replicas == 1 else {}
    script = Script(make=lambda: (Residual(), LOSSES[kind]()), samples=lambda: vectors(40), epochs=2, recipe=clip)
    found = run_over_functions(script, stages=stages, replicas=replicas)
    model, expected = trained_in_a_script(script)
    difference, name = worst_difference(script, found, model)
    assert difference < EQUAL, name
    own = [tensor for name, tensor in found.items() if name.startswith("<loss>")]
    assert len(own) == len(expected)
    for tensor, other in zip(own, expected, strict=True):
        assert torch.allclose(tensor, other, atol=1e-5)


class Centre(nn.Module):
    """A running centre of the outputs, as in DINO, a count of calls, and a log that every call writes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(1, 3))
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0
        self.parts: dict[str, float] = {}

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy((output - self.centre) * self.weight, target) / (1 + 0.1 * self.calls)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0, keepdim=True)
            self.calls += 1
        self.parts = {"loss": loss.item()}
        return loss


CENTRE = Script(
    make=lambda: (Residual(), Centre()), samples=lambda: vectors(40), epochs=2, micro_batch=16, global_batch=16
)


@pytest.mark.parametrize("schedule", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize("recompute", [False, True])
def test_state_of_a_loss_is_kept(schedule: ScheduleKind, recompute: bool) -> None:
    found = run_over_functions(CENTRE, stages=2, schedule=schedule, recompute=recompute)
    model, loss = run_script(CENTRE)
    difference, name = worst_difference(CENTRE, found, model)
    assert difference < EQUAL, name
    assert torch.allclose(found["<loss>.centre"], loss.centre, atol=1e-6)
    assert torch.allclose(found["<loss>.weight"], loss.weight, atol=1e-6)


def test_state_of_a_loss_needs_whole_batches() -> None:
    with pytest.raises(
        PlanError, match=r"calls, centre for the next one.*calls it 4 times .* profile\(micro_batch=16\)"
    ):
        run_over_functions(replace(CENTRE, micro_batch=4))


def held(model: Residual) -> Any:
    return lambda output, target: F.cross_entropy(output, target) + 0.1 * model.head.weight.norm()


class Held(nn.Module):
    def __init__(self, model: Residual) -> None:
        super().__init__()
        self.model = model

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        penalty: Tensor = self.model.head.weight.norm()
        return F.cross_entropy(output, target) + penalty


class WithLoss(Residual):
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


def weights(output: Tensor, target: Tensor, *, watched: list[Tensor]) -> Tensor:
    return F.cross_entropy(output, target) + torch.stack([weight.norm() for weight in watched]).sum()


def with_hook(features: list[Tensor]) -> tuple[nn.Module, Any]:
    model = Residual()

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        features[:] = [output]

    model.blocks[0].register_forward_hook(keep)
    return model, lambda output, target: F.cross_entropy(output, target) + features[0].pow(2).mean()


class Fills(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        self.notes.seen = float(x.detach().sum())
        return super().forward(x)


class Notes:
    seen = 0.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (1 + abs(self.seen))


class Counts:
    calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) / self.calls


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return F.cross_entropy(output * self.weight.clone(), target)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.zeros(3, requires_grad=True)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output + self.bias, target)


def counted() -> Any:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target) / calls

    return loss


class Draws:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output + torch.randn(output.shape, generator=self.generator), target)


Made = Callable[[], tuple[nn.Module, Any]]


def of(make_loss: Callable[[Any], Any], make: Callable[[], nn.Module] = Residual) -> Made:
    def made() -> tuple[nn.Module, Any]:
        model = make()
        return model, make_loss(model)

    return made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of(held), "holds head.weight of the model as loss.model.head.weight, and 11 more"),
        (of(Held), "as loss.model.head.weight.*; functions compute the loss with a copy.*weight_decay"),
        (of(lambda model: model.loss, WithLoss), "as loss.__self__.head.weight.*a function of output and target"),
        (of(lambda m: partial(weights, watched=[m.head.weight.data])), "holds head.weight .* as loss.watched.0;"),
        (lambda: with_hook([]), "the forward of the model changes loss.features.*one more output"),
        (of(lambda model: model.notes.loss, Fills), "the forward of the model changes loss.__self__.seen"),
        (of(lambda model: Counts()), "each call of the loss changes loss.calls for the next one.*nn.Module"),
        (of(lambda model: counted()), "each call of the loss changes loss.calls for the next one.*nn.Module"),
        (of(lambda model: Normalised()), "each call of the loss changes its parameter loss.weight.*F.normalize"),
        (of(lambda model: Plain()), "loss.bias requires a gradient, but is no parameter.*nn.Parameter"),
        (of(lambda model: Draws()), "is another one when it is called again"),
    ],
)
def test_a_loss_that_would_have_stale_copies_is_refused(make: Made, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        run_over_functions(Script(make=make, samples=vectors), stages=1)


class Criterion(Residual):
    """Holds its own loss, which has nothing that is trained."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


class Logs:
    """Every call writes anew what it is made of."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        self.parts["loss"], self.last = loss.item(), loss
        return loss


class Distilled(nn.Module):
    """With a frozen teacher of the model's class."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Residual(blocks=1).requires_grad_(False).eval()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        taught: Tensor = self.teacher(output.repeat(1, 8))
        return F.cross_entropy(output, target) + F.mse_loss(output, taught)


@pytest.mark.parametrize(
    "make",
    [
        of(lambda model: model.criterion, Criterion),
        of(lambda model: Logs()),
        of(lambda model: Distilled()),
        of(lambda model: nn.CrossEntropyLoss()),
    ],
)
def test_an_ordinary_loss_trains_as_before(make: Made) -> None:
    script = Script(make=make, samples=lambda: vectors(16))
    found = run_over_functions(script, stages=1)
    model, _ = run_script(script)
    difference, name = worst_difference(script, found, model)
    assert difference < EQUAL, name
    assert not any(name.startswith("<loss>") for name in found)
