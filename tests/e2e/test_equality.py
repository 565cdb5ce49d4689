"""The proof of the whole: a run over functions equals plain PyTorch in one process."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Dataset

from funcpipe.api import FuncPipe
from funcpipe.core import Plan, ScheduleKind, Streams, Sync
from tests.e2e.networks import RESIDUAL, TRANSFORMER, Network
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.examples import in_long_run

LONG = pytest.mark.long
SHAPES = [(3, 2), *(pytest.param(*shape, marks=LONG) for shape in [(1, 1), (1, 3), (3, 1), (2, 2)])]


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples for a network, floating-point inputs in the precision `dtype`."""

    def __init__(self, network: Network, samples: int, dtype: torch.dtype) -> None:
        inputs, self.targets = network.data(samples)
        self.inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def differences(network: Network, dtype: torch.dtype, *, plan: Plan, model: torch.nn.Module) -> tuple[float, float]:
    """Train 20 steps both ways; the largest relative difference of any loss, and of any tensor of the state."""
    samples = 9 * plan.global_batch + plan.micro_batch + 1  # the last batch is short, and so is its last micro-batch
    dataset = Samples(network, samples, dtype)
    expected = copy.deepcopy(model)
    steps = sample_numbers(plan, samples, epochs=2)
    assert len(steps) == 20
    losses = train(expected, dataset, loss_fn=network.loss, optimizer=momentum, steps=steps)
    result = FuncPipe(model, loss_fn=network.loss, optimizer=momentum).train(dataset, epochs=2, plan=plan)
    assert largest_difference(model.state_dict(), result.state_dict()) == 0
    found = zip(result.losses, losses, strict=True)
    return max(abs(a - b) / b for a, b in found), largest_difference(result.state_dict(), expected.state_dict())


def trained(
    network: Network,
    dtype: torch.dtype,
    stages: int,
    replicas: int,
    *,
    recompute: bool = False,
    sync: Sync = Sync.PIPELINED,
    schedule: ScheduleKind = ScheduleKind.GPIPE,
) -> tuple[float, float]:
    torch.manual_seed(1)
    model = network.model().to(dtype)
    sample = Samples(network, 4, dtype).inputs
    plan = even_plan(
        model,
        (sample,),
        stages=stages,
        replicas=replicas,
        micro_batch=4,
        micro_batches=2,
        recompute=recompute,
        sync=sync,
        schedule=schedule,
    )
    return differences(network, dtype, plan=plan, model=model)


@pytest.mark.parametrize(("stages", "replicas"), SHAPES)
@pytest.mark.parametrize(
    "network", [pytest.param(RESIDUAL, id="residual", marks=LONG), pytest.param(TRANSFORMER, id="transformer")]
)
def test_twenty_steps_in_double_precision_equal_one_process(network: Network, stages: int, replicas: int) -> None:
    """The network with BatchNorm amplifies rounding a thousandfold in a few steps: double precision has room for it."""
    loss, state = trained(network, torch.float64, stages, replicas)
    assert loss < 1e-12
    assert state < 1e-10


@LONG
@pytest.mark.parametrize(("stages", "replicas"), [(3, 2), (1, 3)])
def test_twenty_steps_in_single_precision_equal_one_process(stages: int, replicas: int) -> None:
    loss, state = trained(TRANSFORMER, torch.float32, stages, replicas)
    assert loss < 1e-6
    assert state < 1e-5


@pytest.mark.parametrize(
    "network", [pytest.param(RESIDUAL, id="residual"), pytest.param(TRANSFORMER, id="transformer", marks=LONG)]
)
def test_recomputed_activations_and_three_phases_change_nothing(network: Network) -> None:
    loss, state = trained(network, torch.float64, 2, 3, recompute=True, sync=Sync.THREE_PHASE)
    assert loss < 1e-12
    assert state < 1e-10


@pytest.mark.parametrize("sync", in_long_run([Sync.STREAMED, Sync.EXCHANGE, Sync.ALL_REDUCE]))
def test_every_way_to_synchronise_changes_nothing(sync: Sync) -> None:
    loss, state = trained(RESIDUAL, torch.float64, 2, 3, sync=sync)
    assert loss < 1e-12
    assert state < 1e-10


def test_stages_with_ways_of_their_own_change_nothing() -> None:
    torch.manual_seed(1)
    model, sample = RESIDUAL.model().double(), Samples(RESIDUAL, 4, torch.float64).inputs
    plan = even_plan(model, (sample,), stages=3, replicas=3, micro_batch=4, micro_batches=1)
    first, second, last = plan.stages
    stages = (first, replace(second, sync=Sync.STREAMED, streams=Streams(3, 1, 3)), replace(last, sync=Sync.ALL_REDUCE))
    loss, state = differences(RESIDUAL, torch.float64, plan=replace(plan, stages=stages), model=model)
    assert loss < 1e-12
    assert state < 1e-10


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        (ScheduleKind.ONE_F_ONE_B, True),
        pytest.param(ScheduleKind.ONE_F_ONE_B, False, marks=LONG),
        pytest.param(ScheduleKind.EAGER_ONE_F_ONE_B, False, marks=LONG),
        pytest.param(ScheduleKind.EAGER_ONE_F_ONE_B, True, marks=LONG),
    ],
)
def test_one_forward_one_backward_changes_nothing(schedule: ScheduleKind, recompute: bool) -> None:
    loss, state = trained(RESIDUAL, torch.float64, 3, 2, recompute=recompute, schedule=schedule)
    assert loss < 1e-12
    assert state < 1e-10
