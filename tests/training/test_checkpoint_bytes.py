"""The values that a checkpoint has from each replica, as a plan says, and as functions write them."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import FaultTolerance, OptimizerKind, Plan, Wire
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.testing.memory_storage import MemoryStorage
from tests.e2e.plans import momentum
from tests.in_process import run_workers
from tests.recording import Recording
from tests.training.test_local_steps import job_of, sgd
from tests.training.test_wire_sync import WAYS, model, plan_of

LOCAL: dict[str, Any] = {"sync_every": 2}


class Counting(MemoryStorage):
    """Counts the numbers that belong to parameters in the checkpoint after step 3, by the replica that has written."""

    def __init__(self, parameters: frozenset[str]) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._parameters = parameters

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        name = key.rpartition("/")[2]
        if name.startswith("00000003.") and name.endswith(".safetensors"):
            length = int.from_bytes(data[:8], "little")
            writer = next(part for part in name.split(".") if part.startswith("r") and part[1:].isdigit())
            for tensor, entry in json.loads(bytes(data[8 : 8 + length])).items():
                if tensor.startswith("residual") or any(own in tensor for own in self._parameters):
                    count = 1
                    for size in entry["shape"]:
                        count *= size
                    self.found[writer] += count if entry["shape"] else 0
        super().put(key, data, if_absent=if_absent, gate=gate)


def saved(plan: Plan, optimizer: Callable[..., Any]) -> tuple[float, float]:
    """What the two replicas save, for each number of the model."""
    parameters = dict(model(plan.wire_sync).named_parameters())
    storage = Counting(frozenset(parameters))
    faults = FaultTolerance(checkpoint_steps=3)
    run_workers(job_of(plan, optimizer), storage, platform_url=Recording().url, faults=faults)
    total = sum(parameter.numel() for parameter in parameters.values())
    return storage.found["r0"] / total, storage.found["r1"] / total


@pytest.mark.parametrize(
    ("options", "wire"),
    [
        (LOCAL, Wire.FP32),
        (LOCAL | {"outer_momentum": 0.9}, Wire.INT8),
        (LOCAL | {"outer_momentum": 0.9, "shard_optimizer": True}, Wire.FP32),
        ({}, Wire.INT8),
    ],
)
def test_each_replica_saves_what_the_plan_says(options: dict[str, Any], wire: Wire) -> None:
    plan = plan_of(WAYS[1], 2, wire, optimizer=OptimizerKind.SGD, **options)
    assert sum(saved(plan, sgd)) == pytest.approx(sum(plan.saved_values), rel=0.01)


def test_replicas_that_train_alone_each_save_their_optimiser() -> None:
    """It has nothing yet for parameters that no gradient has reached."""
    plan = plan_of(WAYS[1], 2, Wire.FP32, optimizer=OptimizerKind.SGD, **LOCAL)
    moving = replace(plan, optimizer=OptimizerKind.MOMENTUM)
    more = [having - lacking for having, lacking in zip(saved(moving, momentum), saved(plan, sgd), strict=True)]
    assert 0.5 < more[0] == pytest.approx(more[1])
    assert [a - b for a, b in zip(moving.saved_values, plan.saved_values, strict=True)] == [1.0, 1.0]
    summing = replace(moving, sync_every=1)
    assert (summing.saved_values, replace(summing, shard_optimizer=True).saved_values) == ((2.0, 0), (1.5, 0.5))
