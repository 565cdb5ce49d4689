"""Messages between stages in 16 and 8 bits: the bits of one process that rounds at the cuts."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import Plan, ScheduleKind, Wire
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.verify import verify_states
from tests.e2e.int8_sums import through_8_bits
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import train
from tests.in_process import make_job, run_workers
from tests.training.test_wire_sync import SAMPLES, assert_every_worker_has, vectors


class Skipping(nn.Module):
    """Three stages of two layers each; what the first makes goes to both others."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.first = nn.Linear(5, 30), nn.Linear(30, 300)
        self.second, self.third = nn.Linear(300, 30), nn.Linear(30, 300)
        self.deep, self.wide = nn.Linear(300, 5), nn.Linear(300, 5)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.first(torch.tanh(self.entry(x))))
        deep = self.bent(self.third(self.second(self.sent(wide))))
        output: Tensor = self.deep(self.sent(deep)) + self.wide(self.sent(wide))
        return output

    def bent(self, values: Tensor) -> Tensor:
        """Half of its numbers are 0."""
        return torch.relu(values)

    def sent(self, values: Tensor) -> Tensor:
        """What a later stage receives of `values`."""
        return values


class Rounded(Skipping):
    """The same in one process, where what is sent and the gradients that come back are rounded."""

    formats: ClassVar[tuple[Wire, Wire]]

    def sent(self, values: Tensor) -> Tensor:
        found: Tensor = Crossing.apply(values, *self.formats)  # type: ignore[no-untyped-call]
        return found


class Smooth(Skipping):
    """The same without an edge at which rounding turns gradients on and off."""

    def bent(self, values: Tensor) -> Tensor:
        return torch.tanh(values)


class Crossing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, wire: Wire, wire_back: Wire) -> Tensor:
        context.wire_back = wire_back
        return arrived(values, wire)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return arrived(gradient, context.wire_back), None, None


def arrived(values: Tensor, wire: Wire) -> Tensor:
    """What arrives of `values` in the format `wire`."""
    if wire is Wire.INT8:
        flat = values.detach().numpy().reshape(-1)
        return torch.from_numpy(through_8_bits(flat)).view(values.shape)
    return values.to({Wire.FP32: torch.float32, Wire.BF16: torch.bfloat16}[wire]).float()


def plan_of(wire: Wire, wire_back: Wire | None, **options: Any) -> Plan:
    how: dict[str, Any] = {"stages": 3, "micro_batch": 2, "micro_batches": 3, "schedule": ScheduleKind.ONE_F_ONE_B}
    return even_plan(Skipping(), (torch.zeros(2, 5),), wire=wire, wire_back=wire_back, **how, **options)


def started(kind: type[Skipping]) -> Skipping:
    torch.manual_seed(2)
    return kind()


def in_one_process(plan: Plan) -> dict[str, Tensor]:
    expected = started(type("Rounded", (Rounded,), {"formats": (plan.wire, plan.gradient_wire)}))
    steps = sample_numbers(plan, SAMPLES, epochs=2)
    how: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": momentum, "steps": steps}
    train(expected, vectors(), **how, replicas=plan.replicas)
    return expected.state_dict()


@pytest.mark.parametrize(
    ("wire", "wire_back", "options"),
    [
        (Wire.INT8, None, {"replicas": 1}),
        (Wire.BF16, Wire.INT8, {"replicas": 1}),
        (Wire.BF16, None, {"replicas": 1}),
        (Wire.INT8, Wire.FP32, {"replicas": 3, "recompute": True}),
        (Wire.INT8, None, {"replicas": 2, "recompute": True}),
    ],
)
def test_a_run_has_the_bits_of_one_process_that_rounds_at_the_cuts(
    wire: Wire, wire_back: Wire | None, options: dict[str, Any]
) -> None:
    """A recomputed forward starts from what arrived, as the first one did."""
    plan = plan_of(wire, wire_back, **options)
    job = make_job(started(Skipping), plan, vectors, loss=F.cross_entropy, optimizer=momentum, epochs=2)
    assert_every_worker_has(run_workers(job, MemoryStorage()), in_one_process(plan))


def test_rounding_of_activations_and_of_gradients_shows() -> None:
    formats = [(Wire.FP32, Wire.FP32), (Wire.INT8, Wire.FP32), (Wire.FP32, Wire.INT8), (Wire.INT8, Wire.INT8)]
    found = [in_one_process(plan_of(*pair, replicas=1))["entry.weight"].numpy().tobytes() for pair in formats]
    assert len({*found}) == len(formats)


def test_the_oracle_of_8_bits_keeps_small_blocks_apart() -> None:
    values = np.concatenate([np.full(256, 1000, np.float32), np.full(3, 0.001, np.float32)])
    assert np.allclose(through_8_bits(values), values, rtol=1e-6)


def test_verification_tells_rounding_to_8_bits_from_a_mistake() -> None:
    plan = plan_of(Wire.INT8, None, replicas=2)
    job = make_job(started(Smooth), plan, vectors, loss=F.cross_entropy, optimizer=momentum)
    states = [worker.computation.state().state_dict() for worker in run_workers(job, MemoryStorage()).values()]
    found = {name: tensor for state in states for name, tensor in state.items()}
    plain = job.plain_training(started(Smooth))
    assert verify_states(job.graph, found, plain.run, steps=job.steps).agrees
    start = started(Smooth).state_dict()["third.weight"]
    found["third.weight"] = start + 3 * (found["third.weight"] - start)
    assert not verify_states(job.graph, found, plain.run, steps=job.steps).agrees
