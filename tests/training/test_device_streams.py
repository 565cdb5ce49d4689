"""Activations and gradients cross beside what a device computes, and wait for no more than they need.

On a device that makes a copy when something waits for it, and not before: what is used too early is NaN.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.core import OnNan
from funcpipe.model.graph import trace
from funcpipe.model.split import dump_stage, load_stage, split
from funcpipe.training.batches import Step
from funcpipe.training.device import Device
from funcpipe.training.norms import Finiteness
from funcpipe.training.passes import Passes
from funcpipe.training.recipe import Recipe
from tests.support.stand_in import on_stand_in
from tests.support.stand_in_device import CROSSINGS, NAME, Crossing, current_stream

MICRO_BATCHES = 3
STEP = Step(number=0, epoch=0, micro_batches=tuple((2 * m, 2 * m + 1) for m in range(MICRO_BATCHES)))


def asked() -> int:
    """Return how many operators the device has been asked for."""
    return current_stream().asked


@contextmanager
def crossings() -> Iterator[list[Crossing]]:
    """Yield what crosses in a stream of its own within this context."""
    before, found = len(CROSSINGS), list[Crossing]()
    yield found
    found += CROSSINGS[before:]


class Middle:
    """The passes of the middle one of three stages, on the device, and its layer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        self.layer = copy.deepcopy(model[1]).to(NAME)
        cut = split(trace(model, (torch.zeros(2, 4),)), [(0, 1), (1, 2), (2, 3)])[1]
        stage, _ = load_stage(*dump_stage(cut, None))
        (self.received,), (self.sent,) = stage.receives, stage.sends
        device = Device(torch.device(NAME))
        device.move(stage)
        recipe = Recipe(loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1))
        finiteness, alone = Finiteness(OnNan.IGNORE, 1, {}), {"seed": 0, "recompute": False, "statistics": ()}
        self.passes = Passes(stage, recipe=recipe, finiteness=finiteness, device=device, **alone)  # type: ignore[arg-type]
        self.passes.begin_step(STEP, range(MICRO_BATCHES), lambda _: ({}, None))


def value(m: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(m))


@on_stand_in
def test_messages_wait_for_their_own_micro_batch_alone() -> None:
    """All forwards have been asked for before the first activation leaves, and so it is with backwards."""
    middle, ends = Middle(), list[int]()
    with crossings() as received:
        for m in range(MICRO_BATCHES):
            middle.passes.receive_activation(m, {middle.received: value(m)})
            middle.passes.receive_gradient(m, 2, {middle.sent: value(m + 10)})
    assert received == [Crossing(to_host=False, after=0, asked=received[0].asked)] * 2 * MICRO_BATCHES, "for nothing"
    for m in range(MICRO_BATCHES):
        middle.passes.forward(m)
        ends.append(asked())
    with crossings() as left:
        found = [middle.passes.take_activations(m, [middle.sent])[middle.sent] for m in range(MICRO_BATCHES)]
    assert left == [Crossing(to_host=True, after=end, asked=ends[-1]) for end in ends]
    assert ends == sorted(set(ends))
    ends.clear()
    for m in range(MICRO_BATCHES):
        middle.passes.backward(m, loss_factor=1.0)
        ends.append(asked())
    with crossings() as left:
        gradients = [middle.passes.take_gradients(m, [middle.received])[middle.received] for m in range(MICRO_BATCHES)]
    assert left == [Crossing(to_host=True, after=end, asked=ends[-1]) for end in ends]
    for m, (output, gradient) in enumerate(zip(found, gradients, strict=True)):
        inputs = value(m).to(NAME).requires_grad_()
        expected = middle.layer(inputs)
        expected.backward(value(m + 10).to(NAME))
        assert inputs.grad is not None
        assert torch.equal(output, expected.detach().cpu())
        assert torch.equal(gradient, inputs.grad.cpu())
        assert output.is_pinned(), "the device reaches it"


@on_stand_in
def test_what_crosses_keeps_its_layout() -> None:
    device = Device(torch.device(NAME))
    turned = value(0).t()
    there = device.receive({"a": turned})
    back = device.send(there, device.computed())
    assert there["a"].stride() == back["a"].stride() == turned.stride()
    assert torch.equal(back["a"], turned)


@on_stand_in
def test_the_device_refuses_or_spoils_what_a_gpu_would() -> None:
    """A copy that nothing waited for, memory of another stream, and memory that the device cannot reach."""
    streams = torch.get_device_module(NAME)
    stream = streams.Stream()
    with streams.stream(stream):
        moved = value(0).pin_memory().to(NAME, non_blocking=True)
        with pytest.raises(RuntimeError, match="would hold the processor up"):
            value(0).to(NAME, non_blocking=True)
    with pytest.raises(RuntimeError, match="memory of another stream"):
        moved + 1
    moved.record_stream(streams.current_stream())
    assert moved.cpu().isnan().all()
    stream.record_event().synchronize()
    assert torch.equal(moved.cpu(), value(0))
