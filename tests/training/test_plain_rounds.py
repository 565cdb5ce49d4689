"""Local steps, played in one process, beside the same algorithm written by hand with torch alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lr

from funcpipe.core import Coupled, Interval, OnNan
from funcpipe.errors import FuncPipeError, ModelError
from funcpipe.model.graph import trace
from funcpipe.training.averaging import EMA
from funcpipe.training.batches import Step
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.plain_rounds import LocalSteps, train_in_turn
from funcpipe.training.recipe import Recipe
from tests.examples import at_most
from tests.training.learning import MOMENTUM, all_steps, by_name, data, difference, network, on_whole_batches

SGD = partial(optim.SGD, lr=0.1)
ADAMW = partial(optim.AdamW, lr=0.01, weight_decay=0.1)
STEP_LR = partial(lr.StepLR, step_size=2, gamma=0.5)
STEPS = all_steps()


def add_gradients(model: nn.Module, parts: Sequence[Sequence[int]]) -> None:
    """Those of the mean loss over all samples in `parts`, one forward for each part."""
    samples, count = data(), sum(map(len, parts))
    for indices in filter(None, parts):
        inputs, targets = (torch.stack([samples[i][part] for i in indices]) for part in (0, 1))
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / count
        torch.autograd.backward(loss)


def by_hand(
    make: Callable[[], nn.Module],
    replicas: int,
    every: int,
    *,
    optimizer: Callable[..., Any],
    outer: dict[str, Any] | None = None,
    schedule: Callable[..., Any] = lambda optimizer: lr.ConstantLR(optimizer, 1.0),
    clip: float = math.inf,
    at_once: bool = True,
) -> nn.Module:
    """Each replica takes its share of a batch `at_once`; torch's own Nesterov momentum takes the outer steps."""
    models = [make() for _ in range(replicas)]
    inner = [optimizer(list(m.named_parameters()) if optimizer is by_name else m.parameters()) for m in models]
    schedules = [schedule(one) for one in inner]
    met = make()
    outer_optimizer = optim.SGD(met.parameters(), **(outer or {"lr": 1.0}))
    for done, step in enumerate(STEPS, start=1):
        for rank, model in enumerate(models):
            own = step.micro_batches[rank::replicas]
            inner[rank].zero_grad()
            add_gradients(model, [[i for indices in own for i in indices]] if at_once else own)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            inner[rank].step()
            schedules[rank].step()
        if done % every == 0 or done == len(STEPS):
            with torch.no_grad():
                for theta, *others in zip(met.parameters(), *(model.parameters() for model in models), strict=True):
                    theta.grad = theta - torch.stack([other.detach() for other in others]).mean(0)
                outer_optimizer.step()
                for model in models:
                    for values, theta in zip(model.parameters(), met.parameters(), strict=True):
                        values.copy_(theta)
    return met


def in_turn(make: Callable[[], nn.Module], replicas: int, local: LocalSteps, recipe: Recipe, **given: Any) -> nn.Module:
    model = make()
    inputs = torch.stack([sample for sample, _ in data()[:2]])
    graph = trace(model, (inputs,))
    return train_in_turn(model, graph, data(), STEPS, recipe=recipe, seed=0, replicas=replicas, local=local, **given)


def recipe_of(optimizer: Callable[..., Any], **fields: Any) -> Recipe:
    return Recipe(loss=nn.functional.cross_entropy, optimizer=optimizer, **fields)


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAMW, by_name])
@pytest.mark.parametrize(("replicas", "every", "outer_lr", "outer_momentum"), [(2, 4, 1.0, 0.0), (4, 3, 0.7, 0.9)])
def test_it_is_the_algorithm_as_written_by_hand(
    optimizer: Callable[..., Any], replicas: int, every: int, outer_lr: float, outer_momentum: float
) -> None:
    outer = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": outer_momentum > 0}
    expected = by_hand(network, replicas, every, optimizer=optimizer, outer=outer)
    local = LocalSteps(sync_every=every, outer_lr=outer_lr, outer_momentum=outer_momentum)
    found = in_turn(network, replicas, local, recipe_of(optimizer))
    assert difference(found.state_dict(), expected.state_dict()) < 1e-12
    assert difference(found.state_dict(), network().state_dict()) > 1e-3


def test_each_replica_clips_by_its_own_norm_and_steps_its_own_schedule() -> None:
    expected = by_hand(network, 2, 3, optimizer=MOMENTUM, schedule=STEP_LR, clip=0.05)
    recipe = recipe_of(MOMENTUM, scheduler=STEP_LR, scheduler_interval=Interval.STEP, clip_grad_norm=0.05)
    found = in_turn(network, 2, LocalSteps(sync_every=3), recipe)
    assert difference(found.state_dict(), expected.state_dict()) < 1e-12


def test_meeting_once_at_the_end_is_one_average() -> None:
    expected = by_hand(network, 2, len(STEPS), optimizer=ADAMW)
    found = in_turn(network, 2, LocalSteps(sync_every=None), recipe_of(ADAMW))
    assert difference(found.state_dict(), expected.state_dict()) < 1e-12


def with_dropout() -> nn.Module:
    return nn.Sequential(network(), nn.Dropout(0.3), nn.Linear(4, 4).double().requires_grad_(False))


def seeded_dropout() -> nn.Module:
    torch.manual_seed(3)
    return with_dropout()


@pytest.mark.parametrize("make", [network, seeded_dropout])
@pytest.mark.parametrize("replicas", [1, 2])
def test_meeting_in_every_step_is_plain_training_with_sgd(make: Callable[[], nn.Module], replicas: int) -> None:
    """Shares are equally large here; each micro-batch draws the numbers that it draws in plain training."""
    model = make()
    graph = trace(model, (torch.stack([sample for sample, _ in data()[:2]]),))
    plain = train_in_one_process(model, graph, data(), STEPS, recipe=recipe_of(SGD), seed=0)
    found = in_turn(make, replicas, LocalSteps(sync_every=1), recipe_of(SGD))
    assert difference(found.state_dict(), plain.state_dict()) < 1e-12


def normed() -> nn.Module:
    """BatchNorm comes first, so that its statistics are those of the data alone."""
    return nn.Sequential(nn.BatchNorm1d(6).double(), network())


def test_running_statistics_are_those_of_one_process_and_parameters_those_by_hand() -> None:
    found = in_turn(normed, 2, LocalSteps(sync_every=4), recipe_of(MOMENTUM))
    expected, samples = by_hand(normed, 2, 4, optimizer=MOMENTUM, at_once=False), data()
    norm = nn.BatchNorm1d(6).double()
    for step in STEPS:
        for indices in step.micro_batches:
            norm(torch.stack([samples[i][0] for i in indices]))
    left, right = (make.requires_grad_(False) for make in (found, expected))
    assert difference(dict(left.named_parameters()), dict(right.named_parameters())) < 1e-12
    buffers = {name.removeprefix("0."): buffer for name, buffer in found.named_buffers()}
    assert difference(buffers, dict(norm.named_buffers())) < 1e-12


@at_most(30)
@given(st.integers(0, 30), st.none() | st.integers(1, 8), st.sets(st.integers(0, 30)), st.integers(1, 4))
def test_rounds_hold_every_step_once_and_end_where_they_must(
    count: int, every: int | None, ends: set[int], fragments: int
) -> None:
    steps = [Step(number=number, epoch=0, micro_batches=((0,),)) for number in range(count)]
    met = list(LocalSteps(sync_every=every, fragments=fragments).meetings(steps, ends))
    assert [step for step, _ in met] == steps
    for fragment in range(fragments):
        after = [step.number for step, numbers in met if fragment in numbers]
        assert after[-1:] == [step.number for step in steps[-1:]]
        assert {number for number in ends if number < count} <= set(after)
        lengths = {number: number - before for before, number in pairwise([-1, *after])}
        for number, length in lengths.items():
            assert every is None or length <= every
            is_first = number - length + 1 == 0 or number - length in ends
            assert length == every or is_first or number in ends or number == count - 1


@pytest.mark.parametrize(("every", "fragments"), [(4, 2), (5, 3), (2, 2)])
def test_fragments_meet_as_written_by_hand(every: int, fragments: int) -> None:
    """Each at its own steps, with its own outer momentum; and all in the end, and after step 2."""
    names = [name for name, _ in network().named_parameters()]
    number = {name: place % fragments for place, name in enumerate(names)}
    expected = by_hand_in_fragments(every, fragments, number, end=2)
    local = LocalSteps(sync_every=every, outer_lr=0.7, outer_momentum=0.9, fragments=fragments, fragment_of=number)
    found = in_turn(network, 2, local, recipe_of(ADAMW), ends=(2,))
    assert difference(found.state_dict(), expected.state_dict()) < 1e-12
    whole = in_turn(network, 2, replace(local, fragments=1, fragment_of={}), recipe_of(ADAMW), ends=(2,))
    assert difference(whole.state_dict(), expected.state_dict()) > 1e-6


def test_late_meetings_move_replicas_by_what_they_have_met_on_as_written_by_hand() -> None:
    """Rounds of three steps, measured after steps 2 and 5; outer steps after 4 and 7; all meet after the last, 8."""
    models, met = [network(), network()], network()
    inner = [ADAMW(model.parameters()) for model in models]
    outer = optim.SGD(met.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    measured: list[list[Tensor]] = []
    for place, step in enumerate(STEPS):
        for rank, model in enumerate(models):
            inner[rank].zero_grad()
            add_gradients(model, [[i for indices in step.micro_batches[rank::2] for i in indices]])
            inner[rank].step()
        now = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
        for met_on in [measured] if place in (4, 7) else [now] if place == 8 else []:
            for theta, *others in zip(met.parameters(), *met_on, strict=True):
                theta.grad = theta.detach() - torch.stack(others).mean(0)
            outer.step()
            with torch.no_grad():
                for model, before, after in zip(models, met_on, now, strict=True):
                    for own, theta, then, since in zip(
                        model.parameters(), met.parameters(), before, after, strict=True
                    ):
                        own.copy_(theta + (since - then))
        measured = now if place in (2, 5) else measured
    local = LocalSteps(sync_every=3, outer_lr=0.7, outer_momentum=0.9, delay=2)
    found = in_turn(network, 2, local, recipe_of(ADAMW))
    assert difference(found.state_dict(), met.state_dict()) < 1e-12
    at_once = in_turn(network, 2, replace(local, delay=0), recipe_of(ADAMW))
    assert difference(at_once.state_dict(), met.state_dict()) > 1e-6


def by_hand_in_fragments(every: int, fragments: int, number: dict[str, int], *, end: int) -> nn.Module:
    """Two replicas; an outer optimiser for each fragment, which steps after steps that are written down here."""
    after = {  # the steps of each fragment between the ends, which all have
        (4, 2): ([6], [1, 4]),
        (5, 3): ([7], [0, 3], [5]),
        (2, 2): ([1, 4, 6], [0, 3, 5, 7]),
    }[every, fragments]
    models, met = [network(), network()], network()
    inner = [ADAMW(model.parameters()) for model in models]
    own = [[p for name, p in met.named_parameters() if number[name] == f] for f in range(fragments)]
    outer = [optim.SGD(some, lr=0.7, momentum=0.9, nesterov=True) if some else None for some in own]
    places = {id(p): name for name, p in met.named_parameters()}
    for place, step in enumerate(STEPS):
        for rank, model in enumerate(models):
            inner[rank].zero_grad()
            add_gradients(model, [[i for indices in step.micro_batches[rank::2] for i in indices]])
            inner[rank].step()
        for fragment, optimizer in enumerate(outer):
            if optimizer is None or not (place in after[fragment] or place in (end, len(STEPS) - 1)):
                continue
            for theta in own[fragment]:
                others = [model.get_parameter(places[id(theta)]).detach() for model in models]
                theta.grad = theta.detach() - torch.stack(others).mean(0)
            optimizer.step()
            with torch.no_grad():
                for theta in own[fragment]:
                    for model in models:
                        model.get_parameter(places[id(theta)]).copy_(theta)
    return met


def test_contributions_may_be_rounded_on_their_way() -> None:
    """With sums that lose everything, nobody moves."""

    def nothing(contributions: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(values) for name, values in contributions[0].items()}

    found = in_turn(network, 2, LocalSteps(sync_every=2), recipe_of(SGD), add=nothing)
    assert difference(found.state_dict(), network().state_dict()) == 0


class Remembers(nn.Module):
    """Keeps the largest input that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("most", torch.zeros((), dtype=torch.float64))
        self.most: Tensor

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, x.max()))
        return self.inner(x)


def test_buffers_in_which_replicas_differ_are_refused() -> None:
    with pytest.raises(ModelError, match="buffer most differs between replicas 0 and 1"):
        in_turn(Remembers, 2, LocalSteps(sync_every=2), recipe_of(SGD))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"coupled": Coupled.CACHE}, "coupled=cache"),
        ({"average": EMA(decay=0.9)}, "average"),
        ({"on_nan": OnNan.SKIP}, "on_nan=skip"),
    ],
)
def test_what_has_no_meaning_alone_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(FuncPipeError, match=reason):
        in_turn(network, 2, LocalSteps(sync_every=2), recipe_of(SGD, **fields))


@pytest.mark.parametrize("fields", [{"sync_every": 0}, {"sync_every": 2, "outer_lr": 0.0}])
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FuncPipeError, match=r"sync_every|outer_lr"):
        LocalSteps(**fields)


class Averaging(nn.Module):
    """A norm whose statistics are plain averages over all calls, beside one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused = (nn.BatchNorm1d(6, momentum=None).double() for _ in range(2))
        self.inner = network()

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.norm(x))


def test_statistics_that_are_plain_averages_are_those_of_one_process() -> None:
    found, samples = in_turn(Averaging, 2, LocalSteps(sync_every=4), recipe_of(MOMENTUM)), data()
    norm, unused = (nn.BatchNorm1d(6, momentum=None).double() for _ in range(2))
    for step in STEPS:
        for indices in step.micro_batches:
            norm(torch.stack([samples[i][0] for i in indices]))
    buffers = dict(found.named_buffers())
    for name, expected in (("norm", norm), ("unused", unused)):
        own = {key: buffers[f"{name}.{key}"] for key, _ in expected.named_buffers()}
        assert difference(own, dict(expected.named_buffers())) < 1e-12


def of_one_class(output: Tensor, target: Tensor) -> Tensor:
    """The loss of class 0, over all samples; other classes are not learned."""
    kept = target == 0
    if not kept.any():
        return torch.zeros((), dtype=torch.float64)
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum") / len(target)


def test_micro_batches_whose_loss_needs_no_gradient_add_nothing() -> None:
    samples = data()
    expected = on_whole_batches(network(), samples, of_one_class)
    parts = [{int(samples[i][1]) for i in indices} for step in STEPS for indices in step.micro_batches]
    assert {0 in classes for classes in parts} == {True, False}
    found = in_turn(network, 1, LocalSteps(sync_every=1), Recipe(loss=of_one_class, optimizer=MOMENTUM))
    assert difference(found.state_dict(), expected.state_dict()) < 1e-12
