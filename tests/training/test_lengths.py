"""Micro-batches of different lengths train as in one process, or are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.errors import TaskFailed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.e2e.plans import even_plan, momentum
from tests.e2e.reference import largest_difference
from tests.in_process import make_job, run_workers, states, train_both
from tests.model.graph.test_lengths import Positions

LENGTHS = (10, 4, 7, 13, 2, 10, 5, 9)


def model() -> nn.Module:
    torch.manual_seed(4)
    return Positions().double()


def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.arange(length) * 5 % 23, torch.tensor(i % 3)) for i, length in enumerate(LENGTHS)]


def loss(output: tuple[Tensor, int], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) / output[1]


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 2)])
def test_micro_batches_of_different_lengths_train_as_in_one_process(stages: int, replicas: int) -> None:
    sample = (data()[0][0].unsqueeze(0),)
    plan = even_plan(model(), sample, stages=stages, replicas=replicas, micro_batch=1, micro_batches=2)
    workers, expected = train_both(model(), plan, data, loss=loss, optimizer=momentum)
    assert largest_difference(states(workers), expected.state_dict()) < 1e-10


class LongOnly(Positions):
    def forward(self, ids: Tensor) -> tuple[Tensor, int]:
        output, length = super().forward(ids)
        return (output if length > 6 else -output), length


def test_a_length_that_the_graph_is_wrong_for_is_refused() -> None:
    plan = even_plan(LongOnly(), (data()[0][0].unsqueeze(0),), stages=1, replicas=1, micro_batch=1, micro_batches=2)
    job = make_job(LongOnly(), plan, data, loss=loss, optimizer=momentum)
    with pytest.raises(
        TaskFailed, match=r"DataError: .*test_lengths.py:\d+: `return \(output if length > 6 else -output\)"
    ):
        run_workers(job, MemoryStorage())
