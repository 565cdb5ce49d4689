"""Local functions with the limits of a platform: the same numbers, and the same deaths as there."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.follow.results import RunResult
from funcpipe.core import PlatformSpec
from funcpipe.errors import PlanError, WorkerFailed
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.limits import Groups
from tests.e2e import small


def train(like: PlatformSpec | None, loss: object = F.cross_entropy) -> RunResult:
    torch.manual_seed(1)
    pipe = FuncPipe(small.model(), loss_fn=loss, optimizer=small.optimizer)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "functions with more vCPUs")
        return pipe.train(small.data, plan=small.plan(), like=like, rehearse=False)


def test_limits_change_no_bit_of_the_result() -> None:
    free, limited = train(None), train(replace(load_spec("aws-lambda"), cold_start_s=0.1, latency_s=0.002))
    assert free.losses == limited.losses
    expected = free.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in limited.state_dict().items())


def hungry_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) + torch.ones(1 << 29).sum() * 0


@pytest.mark.skipif(not Groups().memory, reason="no control group for memory can be made here")
def test_a_function_that_needs_more_memory_than_it_has_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"worker s1\.r[01] ran out of memory: peak (9[89]\d|10[0-4]\d) of 1024 MB"):
        train(load_spec("aws-lambda"), hungry_loss)


def test_a_function_that_outlives_its_lifetime_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"worker s.\.r. \(.*\) ended without a report: timed out after 0.5 s"):
        train(replace(load_spec("aws-lambda"), lifetime_s=0.5, cold_start_s=0.1), small.sleeping_loss)


def test_a_plan_for_other_sizes_is_refused_before_any_function_starts() -> None:
    size = replace(load_spec("aws-lambda").sizes[0], name="tiny")
    with pytest.raises(PlanError, match="has no size '1024MB'; it has tiny"):
        train(replace(load_spec("aws-lambda"), sizes=(size,)))
