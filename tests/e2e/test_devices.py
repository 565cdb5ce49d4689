"""Stages on a device with a memory of its own compute what plain PyTorch computes there, and copy what they must."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.core import (
    MB,
    Events,
    FaultTolerance,
    Plan,
    Precision,
    Resource,
    ScheduleKind,
    Sync,
    Validation,
    Wire,
    WorkerReport,
)
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.platforms.base import Invoked
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.attempt import run_attempt
from tests.client import validated
from tests.e2e.networks import TRANSFORMER, Network
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.in_process import Killing, make_job, prepared_run, run_workers, states
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests
from tests.support.stand_in import on_stand_in
from tests.support.stand_in_device import CROSSINGS, NAME, Copies, copies
from tests.training import test_ties

adamw = partial(torch.optim.AdamW, lr=0.01)
Tensors = Mapping[str, Tensor]

WIDE, CLASSES = 8, 3
BUS = (Resource.TO_HOST, Resource.TO_DEVICE)


def small() -> nn.Module:
    """Layers with statistics, and one without parameters that comes last of its stage."""
    first, last = [nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Tanh()], [nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE)]
    return nn.Sequential(*first, *last, nn.ReLU(), nn.Linear(WIDE, CLASSES))


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(2)), torch.arange(samples) % CLASSES


SMALL = Network(small, F.cross_entropy, vectors)


def made(network: Network) -> nn.Module:
    torch.manual_seed(1)
    return network.model()


def plan_of(network: Network, stages: int, replicas: int, *, shard_optimizer: bool = False, **options: Any) -> Plan:
    sample, options = (network.data(2)[0],), {"micro_batch": 3, "micro_batches": 2, **options}
    plan = even_plan(made(network), sample, stages=stages, replicas=replicas, **options)
    return dataclasses.replace(plan, shard_optimizer=shard_optimizer)


def samples_of(network: Network, plan: Plan, steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Samples for so many steps, the last of which is short."""
    return list(zip(*network.data(steps * plan.global_batch - 1), strict=True))


def trained(
    network: Network,
    plan: Plan,
    optimizer: Any,
    *,
    accelerated: bool = True,
    storage: MemoryStorage | None = None,
    faults: FaultTolerance = DEFAULT_FAULTS,
    steps: int = 2,
    **recipe: Any,
) -> Tensors:
    """The state after training by `plan`."""
    samples = samples_of(network, plan, steps)
    job = make_job(made(network), plan, lambda: samples, loss=network.loss, optimizer=optimizer, **recipe)
    return states(run_workers(job, storage or MemoryStorage(), accelerated=accelerated, faults=faults))


def plain(network: Network, plan: Plan, optimizer: Any, **options: Any) -> Tensors:
    """The state after plain training on the device."""
    samples, model = samples_of(network, plan), made(network).to(NAME)
    steps = sample_numbers(plan, len(samples), epochs=1)
    options |= {"steps": steps, "replicas": plan.replicas, "device": NAME}
    train(model, samples, loss_fn=network.loss, optimizer=optimizer, **options)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def differing(found: Tensors, expected: Tensors) -> dict[str, float]:
    """The tensors that differ in any bit, and by how much."""
    assert found.keys() == expected.keys()
    return {
        name: (tensor.double() - found[name].double()).abs().max().item()
        for name, tensor in expected.items()
        if not torch.equal(found[name], tensor)
    }


@pytest.mark.parametrize(
    ("stages", "replicas", "options", "optimizer"),
    [
        (2, 2, {"schedule": ScheduleKind.ONE_F_ONE_B, "sync": Sync.STREAMED}, adamw),
        (2, 2, {"sync": Sync.STREAMED, "shard_optimizer": True}, adamw),
        pytest.param(3, 1, {"recompute": True}, momentum, marks=pytest.mark.long),
    ],
)
@on_stand_in
def test_a_transformer_with_dropout_equals_plain_training_on_the_device(
    stages: int, replicas: int, options: dict[str, Any], optimizer: Any
) -> None:
    plan = plan_of(TRANSFORMER, stages, replicas, **options)
    assert not differing(trained(TRANSFORMER, plan, optimizer), plain(TRANSFORMER, plan, optimizer))


@pytest.mark.parametrize("name", ["small", pytest.param("transformer", marks=pytest.mark.long)])
@on_stand_in
def test_bf16_equals_plain_training_under_autocast_on_the_device(name: str) -> None:
    network = SMALL if name == "small" else TRANSFORMER
    plan = plan_of(network, 2, 2 if network is TRANSFORMER else 1, recompute=network is TRANSFORMER)
    found = trained(network, plan, adamw, precision=Precision.BF16)
    samples, model = samples_of(network, plan), made(network).to(NAME)
    forward, cast = model.forward, partial(torch.autocast, NAME, torch.bfloat16)
    model.forward = cast()(forward)
    steps, loss = sample_numbers(plan, len(samples), epochs=1), cast()(network.loss)
    train(model, samples, loss_fn=loss, optimizer=adamw, steps=steps, replicas=plan.replicas, device=NAME)
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert not differing(found, expected)
    assert largest_difference(found, plain(network, plan, adamw)) > 1e-4, "it does not compute in fp32"


@pytest.mark.parametrize(
    ("stages", "replicas", "options", "optimizer"),
    [
        pytest.param(1, 1, {}, adamw, marks=pytest.mark.long),
        pytest.param(2, 1, {"schedule": ScheduleKind.ONE_F_ONE_B, "recompute": True}, momentum, marks=pytest.mark.long),
        pytest.param(3, 2, {"schedule": ScheduleKind.ONE_F_ONE_B}, adamw, marks=pytest.mark.long),
        (2, 2, {"sync": Sync.STREAMED, "wire": Wire.BF16, "wire_sync": Wire.INT8}, momentum),
        (2, 2, {"sync": Sync.STREAMED, "shard_optimizer": True}, momentum),
        pytest.param(1, 3, {"shard_optimizer": True, "wire_sync": Wire.INT8}, adamw, marks=pytest.mark.long),
    ],
)
@on_stand_in
def test_statistics_and_checkpoints_have_the_bits_of_the_same_plan_on_the_processor(
    stages: int, replicas: int, options: dict[str, Any], optimizer: Any
) -> None:
    plan, storage, other = plan_of(SMALL, stages, replicas, **options), MemoryStorage(), MemoryStorage()
    faults = FaultTolerance(checkpoint_steps=1)
    found = trained(SMALL, plan, optimizer, storage=storage, faults=faults)
    expected = trained(SMALL, plan, optimizer, accelerated=False, storage=other, faults=faults)
    assert not differing(found, expected)
    assert checkpoints(storage) == checkpoints(other)
    if replicas == 1:
        assert not differing(found, plain(SMALL, plan, optimizer))


def checkpoints(storage: MemoryStorage) -> dict[str, bytes]:
    """The files of checkpoints by key, without their signatures: more than one."""
    found = {key: signed_for_tests(storage).get(key) for key in storage.list("") if key.endswith(".safetensors")}
    assert len(found) > 1
    return found


@on_stand_in
def test_gradients_are_clipped_to_the_norm_over_all_stages() -> None:
    plan = plan_of(SMALL, 3, 1)
    found = trained(SMALL, plan, momentum, clip_grad_norm=0.1)
    assert not differing(found, trained(SMALL, plan, momentum, clip_grad_norm=0.1, accelerated=False))
    expected = plain(SMALL, plan, momentum, clip_grad_norm=0.1)
    assert largest_difference(found, expected) < 1e-6 < largest_difference(found, plain(SMALL, plan, momentum))


@pytest.mark.parametrize(
    "last",
    [
        r"s0\.r0/00000001/put-act",
        r"s1\.r0/00000001/put-grad",
        r"checkpoints/s0/00000001.*safetensors",  # which a thread puts beside the second step
        pytest.param(r"s1\.r1/00000001/put-split", marks=pytest.mark.long),
    ],
)
@on_stand_in
def test_a_worker_that_dies_goes_on_from_its_checkpoint(last: str) -> None:
    plan, storage, faults = plan_of(SMALL, 2, 2), Killing(last), FaultTolerance(checkpoint_steps=1)
    found = trained(SMALL, plan, adamw, storage=storage, faults=faults)
    assert storage.last is None
    assert not differing(found, trained(SMALL, plan, adamw))


@on_stand_in
def test_validations_find_the_same() -> None:
    wanted = Validation(data=validated.held_out, every_steps=2, metrics={"error": validated.error_rate})
    job, reports = validated.job(wanted, epochs=1), []
    for accelerated in (True, False):
        storage = MemoryStorage()
        run_workers(job, storage, accelerated=accelerated)
        read = signed_for_tests(storage)
        reports.append({key: read.get(key) for key in storage.list("") if "/validations/" in key})
    assert len(reports[0]) == job.steps // 2
    assert reports[0] == reports[1]


@on_stand_in
def test_parameters_of_several_stages_are_summed_on_the_host() -> None:
    inputs, targets = map(torch.stack, zip(*test_ties.data(), strict=True))
    network = Network(test_ties.model, test_ties.loss, lambda samples: (inputs[:samples], targets[:samples]))
    plan = plan_of(network, 3, 2)
    assert not differing(trained(network, plan, momentum), trained(network, plan, momentum, accelerated=False))


class Positions(nn.Module):
    """A table of values for positions, which are made where the input lies."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.values[torch.arange(x.shape[-1], device=x.device)]


@on_stand_in
def test_what_the_model_makes_and_the_loss_holds_is_on_the_device() -> None:
    """A loss holds its tensors where they are: plain training has them moved, functions have copies that they move."""
    network = Network(
        lambda: nn.Sequential(nn.Linear(4, WIDE), Positions(), nn.Linear(WIDE, CLASSES)), weighted, vectors
    )
    plan = plan_of(network, 2, 1)
    found = trained(network, plan, momentum)
    assert weighted.weight is not None
    assert weighted.weight.device.type == "cpu"
    on_device = dataclasses.replace(network, loss=copy.deepcopy(weighted).to(NAME))
    assert not differing(found, plain(on_device, plan, momentum))


class Recurrent(nn.Module):
    """A recurrent layer, which holds weak references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNN(4, WIDE, batch_first=True)
        self.last = nn.Linear(WIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.inner(x[:, None])[0][:, 0])
        return output


@on_stand_in
def test_a_recurrent_layer_moves_with_its_weak_references() -> None:
    network = Network(Recurrent, F.cross_entropy, vectors)
    plan = plan_of(network, 2, 1)
    assert not differing(trained(network, plan, momentum), plain(network, plan, momentum))


weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.long), 2])
@on_stand_in
def test_a_step_copies_what_the_graph_says(replicas: int) -> None:
    """What four steps copy more than two, without warm-ups, which not every worker has time for. An activation and its
    gradient leave one stage and enter the other on streams of their own, and so do gradients to sum, and their sums.
    """
    plan = plan_of(SMALL, 2, replicas)
    counted, crossed = [], []
    with mock.patch("funcpipe.worker.setup.warm_up"):
        for steps in (2, 4):
            before, crossed_before = copies(), len(CROSSINGS)
            trained(SMALL, plan, momentum, faults=FaultTolerance(checkpoint_steps=100), steps=steps)
            counted.append(copies() - before)
            crossed.append(len(CROSSINGS) - crossed_before)
    found, expected = counted[1] - counted[0], expected_copies(plan, steps=2)
    assert found == expected, f"{found}, expected {expected}"
    assert crossed[1] - crossed[0] == 2 * (4 * plan.micro_batches + (2 * 2 * replicas if replicas > 1 else 0))


@on_stand_in
def test_messages_cross_in_tasks_of_their_own_before_they_are_rounded_for_the_wire() -> None:
    """Of three stages, whose messages have 3 samples of 8 numbers: at either border an activation and its gradient."""
    plan, storage, keys = plan_of(SMALL, 3, 1, wire=Wire.BF16), MemoryStorage(), Keys("run-1", 0, NONCE)
    trained(SMALL, plan, momentum, storage=storage)
    traces = (get_document(signed_for_tests(storage), Events, keys.trace(f"s{stage}.r0", 0)) for stage in range(3))
    events = [event for trace in traces for event in trace.events if event.step == 0]
    copied = Counter((event.lane, event.payload_bytes) for event in events if event.lane in BUS)
    assert copied == dict.fromkeys(((lane, 3 * WIDE * 4) for lane in BUS), plan.micro_batches * 2 * 2)
    first = {event.task: event.start_s for event in sorted(events, key=lambda event: event.start_s)}
    way = [
        *("get-activation.s1.r0.m0.p0.k0", "activation-to-device.s1.r0.m0.p0.k0", "forward.s1.r0.m0"),
        *("activation-to-host.s1.r0.m0.k0", "put-activation.s1.r0.m0.k0"),
    ]
    assert [task for task in first if task in way] == way


def expected_copies(plan: Plan, steps: int) -> Copies:
    """What so many steps of two stages copy, each of which has one norm with statistics.

    Each micro-batch brings inputs, a target, an activation and its gradient, of which the latter two leave another
    stage, and takes a loss of 4 bytes. Replicas sum gradients, the two statistics of each norm, and its calls. They
    read the calls before a step, after each forward, and summed. That all gradients are finite is one number of 8 bytes
    for each, read at once.
    """
    replicas, micro_batches = plan.replicas, plan.global_batch // plan.micro_batch
    workers, crossing_bytes = 2 * replicas, 2 * plan.global_batch * WIDE * 4
    parameters = list(made(SMALL).parameters())
    summed = (replicas > 1) * replicas * (sum(p.numel() for p in parameters) + 2 * (2 * WIDE + 1)) * 4
    counted = (replicas > 1) * (2 * workers + 2 * micro_batches)
    return Copies(
        to_device=steps * (4 * micro_batches + (replicas > 1) * workers),
        to_device_bytes=steps * (plan.global_batch * (4 * 4 + 8) + crossing_bytes + summed),
        to_host=steps * (3 * micro_batches + (replicas > 1) * workers + workers + counted),
        to_host_bytes=steps
        * (crossing_bytes + 4 * micro_batches + summed + 8 * (replicas * len(parameters) + counted)),
    )


def wide() -> nn.Module:
    """Linear layers with 10.5 MB of parameters, for micro-batches whose activations are small beside them."""
    return nn.Sequential(*(nn.Linear(936, 936) for _ in range(3)))


@pytest.mark.parametrize(("room_mb", "ends_well"), [(1, False), (200, True)])
@on_stand_in
def test_peaks_are_reported_and_a_device_that_is_used_up_is_named(room_mb: int, ends_well: bool) -> None:
    """By hand, SGD with momentum has parameters, gradients and momenta, and a gradient is made before it is added."""
    samples = [(torch.ones(936), torch.tensor(n)) for n in range(4)]
    network = Network(wide, F.cross_entropy, lambda count: (torch.ones(count, 936), torch.arange(count)))
    plan, storage, module = plan_of(network, 1, 1, micro_batch=2), MemoryStorage(), torch.get_device_module(NAME)
    job = make_job(wide(), plan, lambda: samples, loss=F.cross_entropy, optimizer=momentum)
    (spec,) = upload(prepared_run(job, storage, accelerated=True), keys := Keys("run-1", 0, NONCE))
    before, had_mb = module.memory_allocated(), 512 + room_mb + module.memory_allocated() // MB
    spec = dataclasses.replace(spec, device_memory_mb=had_mb)
    assert run_attempt(spec, storage, Recording().open, invoked=Invoked()) is ends_well
    report = get_document(signed_for_tests(storage), WorkerReport, keys.worker_report("s0.r0", 0))
    assert report.exhausted_device_mb == (None if ends_well else had_mb)
    assert report.out_of_memory is not ends_well
    used = report.peak_device_bytes - 512 * MB - before
    if ends_well:
        parameters = sum(parameter.nbytes for parameter in wide().parameters())
        assert 3 * parameters <= used < 3.4 * parameters
    else:
        assert used <= (room_mb + 1) * MB
