"""Gradients, their sums, tied gradients and checkpoints cross beside what a device computes, and wait for no more than
they need.

On a device that makes a copy when something waits for it, and not before: what is used too early is NaN, and what is
changed too early is copied as it has become.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.comm.collectives import pattern
from funcpipe.comm.piece_ranges import piece_ranges
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import Sync, Wire
from funcpipe.core.routes import TieRoute
from funcpipe.model.graph import trace
from funcpipe.model.split import StageModule, dump_stage, load_stage, split
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.device import HOST, Device
from funcpipe.training.gradients import FlatGradient
from funcpipe.training.recipe import Recipe
from funcpipe.training.state import StageState, settings_to_text
from funcpipe.training.tied import TiedParameters
from tests.support import stand_in_device
from tests.support.stand_in import on_stand_in
from tests.support.stand_in_device import NAME, Copies, Event, copies
from tests.training import test_ties
from tests.training.test_device_streams import asked, crossings

NO_PROCESSOR_WAITS = mock.patch.object(Event, "synchronize", side_effect=AssertionError("the processor waits"))
WAIT_S = 120.0


def device() -> Device:
    return Device(torch.device(NAME))


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Streamed:
    """Three layers with a flat gradient on a device; `final` has how much had been asked for when a gradient became so.

    The last backward stops, once it `reached` the output of the first layer, until it `may_end`.
    """

    def __init__(self, place: Device, *, wire: Wire = Wire.FP32) -> None:
        torch.manual_seed(1)
        where = "cpu" if place.is_host else NAME
        self.layers = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3))).to(where)
        names = [f"{layer}.{kind}" for layer in range(3) for kind in ("bias", "weight")]
        self.parameters = [self.layers.get_parameter(name) for name in names]
        self.flat = FlatGradient(self.parameters, [torch.zeros(2)], wire, place)
        self.final: dict[int, int] = {}
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]
        self.inputs = [values(seed, 2, 600).to(where) for seed in range(2)]
        self.reached, self.may_end = threading.Event(), threading.Event()

    def _note(self, number: int, _: Any) -> None:
        self.final[number] = asked()

    def start(self) -> None:
        """A micro-batch, and the last one, whose backward goes on in a thread."""
        self.flat.begin_step()
        self.layers(self.inputs[0]).square().sum().backward()
        self.flat.start_last_backward(self._compute)
        assert self.reached.wait(WAIT_S)

    def _compute(self) -> None:
        hidden = self.layers[0](self.inputs[1])
        hidden.register_hook(lambda _: self._stop())
        self.layers[1:](hidden).square().sum().backward()

    def _stop(self) -> None:
        self.reached.set()
        assert self.may_end.wait(WAIT_S), "the test has not got what was final"


@pytest.mark.parametrize("wire", [Wire.FP32, Wire.BF16])
@on_stand_in
def test_a_bucket_waits_for_no_more_than_what_made_it_final_and_the_device_goes_on(wire: Wire) -> None:
    on_host, here = Streamed(HOST, wire=wire), Streamed(device(), wire=wire)
    flat, start = here.flat, here.flat.layout.slice_of(4).start
    assert flat.vector.is_pinned()
    on_host.may_end.set()
    on_host.start()
    on_host.flat.finish_last_backward()
    on_host.flat.complete([torch.ones(2)])
    here.start()
    before = copies()
    with crossings() as left:
        flat.wait_for(start, flat.layout.elements)  # the last layer's, while the backward has come to the first one
    (crossing,) = left
    assert crossing.after == max(here.final[4], here.final[5]) < here.final[2] <= crossing.asked
    assert torch.equal(flat.vector[start:], on_host.flat.vector[start:])
    here.may_end.set()
    with crossings() as left:
        flat.wait_for(flat.layout.head, start)
    assert [crossing.after for crossing in left] == [max(here.final[number] for number in range(4))]
    flat.finish_last_backward()
    with crossings() as left:
        flat.complete([torch.ones(2)])
    assert [crossing.after for crossing in left] == [asked()]
    assert torch.equal(flat.vector, on_host.flat.vector)
    assert copies() - before == Copies(to_device=1, to_device_bytes=8, to_host=3, to_host_bytes=flat.vector.nbytes)


@on_stand_in
def test_gradients_that_the_last_backward_does_not_make_are_waited_for_too() -> None:
    """The weight's gradient is of the micro-batch before, and the bias has none; in the next step, neither has."""
    layer, inputs = nn.Linear(4, 4).to(NAME), values(1, 2, 4).to(NAME)
    flat = FlatGradient([*layer.parameters()], [], device=device())
    F.linear(inputs, layer.weight).sum().backward()  # type: ignore[no-untyped-call]
    flat.start_last_backward(lambda: None)
    flat.finish_last_backward()
    with crossings() as left:
        flat.wait_for(0, flat.layout.elements)
    assert [crossing.after for crossing in left] == [asked()]
    assert torch.equal(flat.vector[:16].view(4, 4), inputs.cpu().sum(0).expand(4, 4))
    assert ((flat.vector[16:] == 0) & flat.vector[16:].signbit()).all()
    flat.begin_step()
    begun = asked()
    flat.start_last_backward(lambda: None)
    inputs + 1
    with crossings() as left:
        flat.wait_for(0, flat.layout.elements)
    assert [crossing.after for crossing in left] == [begun]
    assert ((flat.vector == 0) & flat.vector.signbit()).all()


@on_stand_in
def test_sums_return_once_and_the_device_alone_waits_for_them() -> None:
    streamed = Streamed(device())
    flat, parameters = streamed.flat, streamed.parameters
    flat.complete([torch.zeros(2)])
    flat.vector.copy_(values(3, flat.layout.elements))
    summed = flat.vector.clone()
    before = copies()
    with NO_PROCESSOR_WAITS, crossings() as found:
        hooked = flat.summed(parameters[1])
        extras = flat.unpack_gradients()
    assert [(crossing.to_host, crossing.after) for crossing in found] == [(False, 0)]
    assert copies() - before == Copies(to_device=1, to_device_bytes=summed.nbytes)
    assert hooked is not None
    assert torch.equal(hooked.cpu(), summed[602 : 602 + 360_000].view(600, 600))
    assert torch.equal(extras[0].cpu(), summed[:2])
    grads = [parameter.grad for parameter in parameters]
    assert torch.equal(torch.cat([grad.cpu().reshape(-1) for grad in grads if grad is not None]), summed[2:])


def placed(stage: StageModule) -> StageModule:
    """Return `stage` as a function has it, on the device."""
    loaded, _ = load_stage(*dump_stage(stage, None))
    device().move(loaded)
    return loaded


def tied_parts() -> tuple[TiedParameters, TiedParameters]:
    """Those of the first and the last stage of a model with a weight in both."""
    graph = trace(test_ties.model(), (torch.zeros(2, 3, dtype=torch.long),))
    last = len(graph.layers) - 1
    first, _, end = map(placed, split(graph, [(0, 1), (1, last), (last, last + 1)]))
    routes = [TieRoute(stages=(0, 2), parameters=("words.weight",), payload_bytes=0)]
    return TiedParameters(first, routes, 0, device()), TiedParameters(end, routes, 2, device())


@on_stand_in
def test_tied_gradients_wait_for_the_backward_or_the_sum_that_made_them() -> None:
    name, (first, last) = "words.weight", tied_parts()
    shape = first.parameter(name).shape
    expected = [values(seed, *shape).double() for seed in (1, 2)]
    for part, gradient in zip((first, last), expected, strict=True):
        part.parameter(name).grad = gradient.to(NAME)
    made = torch.ones(3, device=NAME) + 1
    last.after_backward()
    end = asked()
    made + 1
    with crossings() as left:
        sent = last.gradients([name])
    assert [(crossing.to_host, crossing.after) for crossing in left] == [(True, end)]
    assert torch.equal(sent[name], expected[1])
    assert sent[name].is_pinned()
    last.after_backward()
    end = asked()
    with crossings() as left:
        last.gradients([name])
    assert [crossing.after for crossing in left] == [end], "of the next step"
    with crossings() as received:
        first.receive(sent)
    assert [(crossing.to_host, crossing.after) for crossing in received] == [(False, 0)]
    first.add_received()
    end = asked()
    made + 1
    with crossings() as left:
        total = first.gradients([name])
    assert [crossing.after for crossing in left] == [end]
    assert torch.equal(total[name], expected[0] + expected[1])
    last.receive_sums(total)
    last.finish_step()
    grad = last.parameter(name).grad
    assert grad is not None
    assert torch.equal((grad + 1).cpu(), total[name] + 1)


STEPS = [Step(number=n, epoch=0, micro_batches=((0, 1, 2), (3, 4, 5))) for n in range(4)]


def network() -> nn.Module:
    """One tensor of it takes pages of its own."""
    return nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(600, 3))


class Learning:
    """One stage that learns on the device, step by step."""

    def __init__(self, replicas: int = 1, shards: Pattern | None = None) -> None:
        torch.manual_seed(1)
        self.replicas = replicas
        graph = trace(network(), (torch.zeros(3, 600),))
        self.stage = placed(*split(graph, [(0, len(graph.layers))]))
        optimizer = partial(torch.optim.AdamW, lr=torch.tensor(0.01))
        schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
        recipe = Recipe(loss=F.cross_entropy, optimizer=optimizer, scheduler=schedule)
        options = {"recompute": False, "replica": 0, "replicas": replicas, "device": device(), "shards": shards}
        self.learns = Computation(self.stage, recipe=recipe, seed=0, **options)  # type: ignore[arg-type]

    def passes(self, step: int) -> None:
        """The forwards and backwards of a step."""
        (name,) = self.stage.inputs
        self.learns.begin_step(
            STEPS[step], lambda m: ({name: values(10 * step + m, 3, 600)}, torch.arange(3)), range(2)
        )
        for m in range(2):
            self.learns.forward(m)
            self.learns.backward(m)

    def flatten(self) -> None:
        """Make its own gradients the sums."""
        if self.replicas > 1:
            self.learns.flatten()

    def step(self, step: int) -> None:
        self.passes(step)
        self.flatten()
        self.learns.update()


def held(stage: StageModule, learns: Computation) -> dict[str, Tensor]:
    """What a checkpoint must hold now, read from the stage and its optimiser one after the other."""
    found = {f"model/{name}": tensor.detach().cpu().clone() for name, tensor in stage.state_dict().items()}
    optimizer = learns._optimizer._optimizer
    assert optimizer is not None
    for name, parameter in stage.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            found[f"optimizer/{name}/{key}"] = tensor.cpu().clone()
    found["optimizer/group/0/lr"] = optimizer.param_groups[0]["lr"].clone()
    return found


def differing(state: StageState, expected: dict[str, Tensor]) -> list[str]:
    assert expected.keys() <= state.tensors.keys()
    return [name for name, tensor in expected.items() if not torch.equal(state.tensors[name], tensor)]


@pytest.mark.parametrize("replicas", [1, 2])
@on_stand_in
def test_a_checkpoint_is_copied_beside_the_next_passes_and_before_the_next_update(replicas: int) -> None:
    """Running statistics of one replica are replaced in each forward, those of several are written in place."""
    learning = Learning(replicas)
    learning.step(0)
    expected, settings = held(learning.stage, learning.learns), settings_to_text(learning.learns.state().settings)
    with NO_PROCESSOR_WAITS, crossings() as found:
        begun = learning.learns.begin_state()
        end = asked()
        learning.passes(1)
    assert not found, "the next passes wait for no copy"
    with crossings() as found:
        learning.flatten()
        with NO_PROCESSOR_WAITS:
            learning.learns.update()
    own = [crossing for crossing in found if crossing.after == end < crossing.asked and crossing.to_host]
    assert len(own) == 3 * len([*learning.stage.parameters()]), "parameters and their two moments"
    assert len(found) == len(own) + (2 if replicas > 1 else 0), "and gradients and their sums"
    with crossings() as found, begun as state:
        assert not found
        assert not differing(state, expected)
        assert settings_to_text(state.settings) == settings
        assert all(tensor.is_pinned() for tensor in state.tensors.values())
    assert differing(learning.learns.state(), expected)


@on_stand_in
def test_a_checkpoint_is_what_it_was_when_the_stage_goes_back() -> None:
    learning = Learning()
    learning.step(0)
    with learning.learns.begin_state() as state:
        first = StageState(
            tensors={name: tensor.clone() for name, tensor in state.tensors.items()},
            aliases=state.aliases,
            transient=state.transient,
            settings=state.settings,
        )
    learning.step(1)
    expected = held(learning.stage, learning.learns)
    begun = learning.learns.begin_state()
    learning.learns.restore(first)
    with begun as state:
        assert not differing(state, expected)
    assert not differing(learning.learns.state(), dict(first.tensors))


@on_stand_in
def test_a_checkpoint_has_the_memory_of_the_one_before_and_waits_for_its_end() -> None:
    learning = Learning()
    learning.step(0)
    expected, begun = held(learning.stage, learning.learns), learning.learns.begin_state()
    learning.step(1)
    with ThreadPoolExecutor(1) as threads:
        after = threads.submit(learning.learns.begin_state)  # waits, as a worker's loop does
        with begun as state:
            assert not differing(state, expected)
            places = {name: tensor.data_ptr() for name, tensor in state.tensors.items()}
        again = after.result()
    with again as state:
        assert not differing(state, held(learning.stage, learning.learns))
        assert {name: tensor.data_ptr() for name, tensor in state.tensors.items()} == places


@on_stand_in
def test_a_divided_optimiser_updates_its_share_on_the_device_once_the_checkpoint_is_copied() -> None:
    shards = pattern(Sync.PIPELINED, 2)
    learning = Learning(2, shards)
    flat, learns = learning.learns.flat, learning.learns
    shares = [splits[0] for splits in piece_ranges(flat.layout.elements, shards, flat.layout.head)]

    def update_share() -> None:
        for number, share in enumerate(shares):
            learns.update_split(0, number, flat.vector[slice(*share)])

    learning.passes(0)
    learning.flatten()
    update_share()
    learns.update()
    expected = {name: tensor.clone() for name, tensor in learns.state().tensors.items()}
    begun = learns.begin_state()
    end = asked()
    with crossings() as found:
        update_share()
    kept = [name for name, tensor in expected.items() if name.startswith("optimizer/") and tensor.dim()]
    first = len([*learning.stage.parameters()]) + len(kept)
    assert {(crossing.to_host, crossing.after) for crossing in found[:first]} == {(True, end)}
    assert [crossing.to_host for crossing in found[first:]] == [False, True] * len(shares)
    assert found[-1].after == asked()
    with begun as state:
        assert not differing(state, expected)
    assert differing(learns.state(), expected)


@on_stand_in
def test_memory_for_copies_is_as_large_as_it_must_be_and_goes_with_them() -> None:
    before = len(stand_in_device.PINNED._places)
    blocks = [device().block(size) for size in (0, 5, 3_000_001)]
    assert [block.untyped_storage().nbytes() for block in blocks] == [0, 5, 3_000_001]
    assert all(block.is_pinned() for block in blocks[1:])
    assert blocks[2][7:].view(-1).is_pinned()
    del blocks
    assert len(stand_in_device.PINNED._places) == before
    assert not HOST.block(3_000_001).is_pinned()
    assert list(itertools.chain(HOST.block(0))) == []
