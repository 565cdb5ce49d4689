"""A run whose functions must hand over, for tests of platforms."""

import time
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.core import FaultTolerance, Outcome, Plan
from funcpipe.testing.memory_storage import MemoryStorage
from tests.e2e import small
from tests.in_process import make_job, run_workers

WATCHED = FaultTolerance(heartbeat_s=0.5, lease_s=1.0, checkpoint_steps=1)
LATE_S = 3 * WATCHED.heartbeat_s
"""How long after the last sign of life of a function its watchdog sees that the next one is late."""

LOOK_S = 1.0
"""The pause between two looks at the state of a run, each of which takes many requests."""

SHORT = FaultTolerance(lifetime_s=4.0)
"""A function with this lifetime must leave some 3 s after it began; the four steps of `long_job` take 4 s and more."""


def long_job(plan: Plan) -> Job:
    """Four steps of a second, for a plan of one replica."""
    torch.manual_seed(0)
    loss, optimizer = half_a_second_s_loss, small.optimizer
    return make_job(small.model(), plan, four_steps, loss=loss, optimizer=optimizer, deadline_s=200)


def half_a_second_s_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a while; a step has two."""
    time.sleep(0.5)
    return torch.nn.functional.cross_entropy(output, target)


def four_steps() -> list[tuple[Tensor, Tensor]]:
    return small.data()[:16]


def gated_job(plan: Plan) -> Job:
    """Sixteen steps of a plan of one stage and replica; a function that does ten waits, and may be ended meanwhile."""
    torch.manual_seed(0)
    loss, optimizer = small.gated_loss, small.optimizer
    return make_job(small.model(), plan, eight_steps, loss=loss, optimizer=optimizer, epochs=2, deadline_s=200)


def assert_like_one_process(result: RunResult, job: Job) -> None:
    """The result has the bits of a run in one process, whose loss waits for nothing."""
    hurried = replace(job, recipe=replace(job.recipe, loss=torch.nn.functional.cross_entropy))
    reference: dict[str, Tensor] = {}
    for worker in run_workers(hurried, MemoryStorage()).values():
        reference |= worker.computation.state().state_dict()
    assert result.tensors.keys() == reference.keys()
    assert all(torch.equal(result.tensors[name], reference[name]) for name in reference)


def eight_steps() -> list[tuple[Tensor, Tensor]]:
    return small.data()[:32]


def assert_handed_over(result: RunResult, job: Job) -> None:
    """Each worker was several functions, and the result has the bits of a run in one process."""
    ended = Counter((report.worker, report.outcome) for report in result.workers)
    for stage in range(len(job.plan.stages)):
        assert ended[f"s{stage}.r0", Outcome.HANDED_OVER] >= 1
        assert ended[f"s{stage}.r0", Outcome.FINISHED] >= 1
    assert_like_one_process(result, job)
