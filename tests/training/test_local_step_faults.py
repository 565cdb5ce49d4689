"""Replicas that train alone and die, or are replaced: each repeats its own steps, to the bits."""

import logging
from typing import Any

import pytest

from funcpipe.core import FaultTolerance, Wire
from funcpipe.testing.memory_storage import MemoryStorage
from tests.examples import in_long_run
from tests.in_process import Killing, run_workers
from tests.recording import Recording
from tests.training.test_local_steps import (
    assert_equal_to_the_reference,
    job_of,
    local_plan,
    rounded_to_int8,
)
from tests.training.test_wire_sync import WAYS, adam


def train(storage: Killing, wire: Wire = Wire.FP32, *, every: int = 2, **options: Any) -> None:
    """Six steps in rounds of four and two, saved after every so many; the bits must be those of the reference."""
    plan = local_plan(WAYS[1], 2, wire, **{"sync_every": 4, "outer_lr": 0.8, "outer_momentum": 0.5, **options})
    job = job_of(plan, adam)
    workers = run_workers(job, storage, platform_url=Recording().url, faults=FaultTolerance(checkpoint_steps=every))
    assert storage.last is None, "nobody was killed"
    add = (rounded_to_int8(workers, job.plan),) if wire is Wire.INT8 else ()
    assert_equal_to_the_reference(workers, job, *add)


DEATHS = [
    ("s0.r1", "00000003/put-activation", 2, 2, Wire.FP32),  # in the middle of a round, after its checkpoint
    ("s1.r0", "00000002/put-gradient", 2, 2, Wire.INT8),
    ("s0.r0", "00000003/put-split", 2, 2, Wire.INT8),  # in the meeting
    ("s1.r1", "00000003/put-merged", 3, 3, Wire.FP32),
    ("s1.r1", "00000005/put-gradient", 3, 3, Wire.INT8),  # after a meeting that it repeats
    ("s1.r0", "00000005/put-gradient", 4, 4, Wire.FP32),  # after one that its checkpoint holds
]
OTHER = {Wire.FP32: Wire.INT8, Wire.INT8: Wire.FP32}


@pytest.mark.parametrize(
    ("killed", "last", "every", "restored", "wire"),
    [*DEATHS, *in_long_run((*death[:4], OTHER[death[4]]) for death in DEATHS)],
)
def test_a_replica_that_is_killed_repeats_its_own_steps(
    killed: str, last: str, every: int, restored: int, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "funcpipe")
    train(Killing(f"/messages/{killed}/{last}"), wire, every=every)
    assert f"restored the checkpoint after step {restored}" in caplog.text
    assert "goes back to its stage's checkpoint" not in caplog.text, "replicas agree on what they share in a round too"


@pytest.mark.parametrize(
    ("killed", "last", "every", "wire"),
    [
        ("s0.r1", "00000001/put-split", 1, Wire.INT8),  # while the second fragment meets
        ("s1.r0", "00000002/put-gradient", 2, Wire.FP32),  # between two meetings, when one fragment has begun anew
        ("s0.r0", "00000005/put-merged.*f1", 2, Wire.INT8),  # where both meet, each by itself
        pytest.param("s1.r1", "00000005/put-split.*f0", 3, Wire.FP32, marks=pytest.mark.long),
        pytest.param("s1.r0", "00000003/put-merged", 1, Wire.INT8, marks=pytest.mark.long),
    ],
)
def test_so_does_one_whose_parameters_meet_in_fragments(killed: str, last: str, every: int, wire: Wire) -> None:
    train(Killing(f"/messages/{killed}/{last}"), wire, every=every, sync_fragments=2)


@pytest.mark.parametrize(
    ("killed", "last", "every", "wire"),
    [
        ("s0.r1", "00000004/put-split.*f0.d2", 1, Wire.INT8),  # as soon as it has begun to meet, beside step 3
        ("s1.r0", "00000004/put-gradient", 1, Wire.INT8),  # beside step 4, with what travelled beside step 3
        ("s0.r0", "00000004/put-merged.*f0.d2", 2, Wire.FP32),
        ("s1.r1", "00000005/put-gradient", 5, Wire.FP32),  # once the outer step is taken, which the checkpoint holds
        pytest.param("s1.r1", "00000004/put-merged.*f0.d2", 1, Wire.INT8, marks=pytest.mark.long),
        pytest.param("s0.r0", "00000005/put-split", 2, Wire.INT8, marks=pytest.mark.long),
    ],
)
def test_so_does_one_that_meets_beside_its_steps(killed: str, last: str, every: int, wire: Wire) -> None:
    """Measured after step 2; the outer step comes after step 4, and all meet after step 5, the last one."""
    train(Killing(f"/messages/{killed}/{last}"), wire, every=every, sync_every=3, sync_delay=2)


@pytest.mark.parametrize("every", [1, 4])
def test_who_waits_for_a_meeting_waits_on_while_others_report_steps(every: int) -> None:
    """A replica may be many steps behind; between replicas that meet in every step, only new functions excuse that."""
    workers = run_workers(job_of(local_plan(sync_every=every)), MemoryStorage())
    channel = workers["s0.r0"].runner.actions._channel
    reports = {f"/steps/{step:08d}.s1.r{replica}" for step in range(6) for replica in range(2)}
    found = {report for report in reports if any(name.endswith(report) for name in channel._started())}
    assert found == (reports if every > 1 else set())
