"""What scripts do with several losses or optimisers, done over functions as the docs say, equals those scripts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from funcpipe import FuncPipe
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import write_back
from funcpipe.client.prepare.job import Learned, Learner, SampleOrder, make_job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunSettings
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.recipe import recipe_with
from tests.jobs.scripts import EQUAL, Script, job_of, run_over_functions, run_script, worst_difference

WIDTH = 10


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign, times `scale`."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradients[0], None


class DomainAdversarial(nn.Module):
    """DANN: features that tell the label, and from which the domain cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = perceptron(WIDTH, 6), perceptron(6, 3), perceptron(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.label(features), self.domain(Reversed.apply(features, 0.7))  # type: ignore[no-untyped-call]


def both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Labels and domains; a mean over samples each."""
    return F.cross_entropy(output[0], target[:, 0]) + 0.5 * F.cross_entropy(output[1], target[:, 1])


def with_domains() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randn(42, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(x, torch.tensor([i % 3, i % 2])) for i, x in enumerate(drawn)]


def groups(named_parameters: Any) -> torch.optim.Optimizer:
    """What a script does with an optimiser for the features and another one for the rest, which step together."""
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        parts[name.startswith("domain.")].append(parameter)
    return torch.optim.SGD([{"params": parts[False], "lr": 0.05}, {"params": parts[True], "lr": 0.2, "momentum": 0.9}])


def batches(samples: Any, size: int) -> Any:
    return DataLoader(samples, batch_size=size)


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    own = [p for name, p in model.named_parameters() if not name.startswith("domain.")]
    domain = model.get_submodule("domain").parameters()
    return [torch.optim.SGD(own, lr=0.05), torch.optim.SGD(domain, lr=0.2, momentum=0.9)]


ADVERSARIAL = Script(make=lambda: (DomainAdversarial(), both), samples=with_domains, epochs=2)


def test_reversed_gradients_equal_a_script() -> None:
    found = run_over_functions(ADVERSARIAL, stages=3, replicas=2)
    difference, name = worst_difference(ADVERSARIAL, found, run_script(ADVERSARIAL)[0])
    assert difference < EQUAL, name


def test_frozen_parts_stay_as_they_are() -> None:
    def frozen() -> tuple[nn.Module, Any]:
        model = DomainAdversarial()
        model.label.requires_grad_(False)
        return model, both

    script = replace(ADVERSARIAL, make=frozen, epochs=1)
    difference, name = worst_difference(script, run_over_functions(script, stages=3), run_script(script)[0])
    assert difference < EQUAL, name


def test_optimisers_that_step_together_are_groups_of_one() -> None:
    model, loss = ADVERSARIAL.made()
    optimizers = two_optimizers(model)
    for _ in range(ADVERSARIAL.epochs):
        for x, target in batches(with_domains(), ADVERSARIAL.global_batch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.autograd.backward(loss(model(x), target))
            for optimizer in optimizers:
                optimizer.step()
    found = run_over_functions(replace(ADVERSARIAL, optimizer=groups))
    difference, name = worst_difference(ADVERSARIAL, found, model)
    assert difference < EQUAL, name


def test_a_factory_of_several_optimisers_is_refused() -> None:
    def configure_optimizers(parameters: list[nn.Parameter]) -> Any:
        return torch.optim.SGD(parameters[:4], lr=0.1), torch.optim.Adam(parameters[4:])

    message = "returns 2 optimisers, .* make them groups of one .* in turn: see Several optimisers in docs/training.md"
    with pytest.raises(InputError, match=message):
        FuncPipe(DomainAdversarial(), loss_fn=both, optimizer=configure_optimizers)


class Fooling(nn.Module):
    """A generator before its critic, of which only the generator is trained."""

    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise: Tensor) -> Tensor:
        judged: Tensor = self.critic(self.generator(noise))
        return judged


class Trained:
    """A module and what its FuncPipe has learned, trained over functions that are threads."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.model, self.recipe = model, recipe_with(F.mse_loss, optimizer, {})
        self.learned: Learned | None = None

    def train(self, samples: Any, stages: int) -> None:
        """One epoch, on whatever of the module is trainable now."""
        script = Script(make=lambda: (self.model, F.mse_loss), samples=lambda: samples, optimizer=self.recipe.optimizer)
        learner = Learner(model=self.model, recipe=self.recipe, learned=self.learned)
        plan = job_of(script, stages=stages, replicas=2).plan
        job = make_job(learner, samples, plan, SampleOrder(shuffle=False), RunSettings())
        storage = MemoryStorage()
        platform = ThreadPlatform(load_spec("local"), storage)
        session = session_on(Site(platform, storage, "memory://"), reopen=platform.open)
        try:
            result = launch(prepare(job, session, learned=self.learned))
        finally:
            platform.stop_all()
        self.learned = write_back(result, self.model, F.mse_loss, job.epochs)


def real_and_generated(generator: nn.Module, round_number: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(round_number)
    real = torch.randn(16, 4, generator=draw, dtype=torch.float64) + 2
    with torch.no_grad():
        generated = generator(noise(round_number))
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    return [pair for a, b in zip(real, generated, strict=True) for pair in ((a, one), (b, zero))]


def noise(round_number: int) -> Tensor:
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(100 + round_number), dtype=torch.float64)


ADAM = partial(torch.optim.Adam, lr=0.01)


def test_parts_that_are_trained_in_turn_equal_a_script() -> None:
    def made() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return perceptron(3, 4), perceptron(4, 1)

    generator, critic = made()
    fooling, judging = Trained(Fooling(generator, critic), ADAM), Trained(critic, ADAM)
    for round_number in range(2):
        judging.train(real_and_generated(generator, round_number), stages=2)
        critic.requires_grad_(False)
        fooling.train([(x, torch.ones(1, dtype=torch.float64)) for x in noise(round_number)], stages=3)
        critic.requires_grad_(True)
    found = {**generator.state_dict(), **{f"critic.{name}": tensor for name, tensor in critic.state_dict().items()}}

    generator, critic = made()
    of_critic, of_generator = ADAM(critic.parameters()), ADAM(generator.parameters())
    for round_number in range(2):
        for x, target in batches(real_and_generated(generator, round_number), 16):
            of_critic.zero_grad()
            torch.autograd.backward(F.mse_loss(critic(x), target))
            of_critic.step()
        for (x,) in batches([(x,) for x in noise(round_number)], 16):
            of_generator.zero_grad()
            judged = critic(generator(x))
            torch.autograd.backward(F.mse_loss(judged, torch.ones_like(judged)))
            of_generator.step()
    expected = {**generator.state_dict(), **{f"critic.{name}": tensor for name, tensor in critic.state_dict().items()}}
    worst = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    assert worst < 1e-12
