"""What loading takes, measured: seconds by a clock of the test, memory of what functions will hold."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from funcpipe.client.prepare.profiling import profile_data
from funcpipe.errors import DataError


class Ticking(Dataset[Any]):
    """Samples that take two seconds each by the test's clock."""

    def __init__(self) -> None:
        self.last_s = 0.0

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.last_s += 2.0
        return torch.zeros(5), torch.tensor(index)

    def clock(self) -> float:
        return self.last_s


def test_seconds_are_those_of_a_micro_batch_shared_by_the_processes_that_load() -> None:
    dataset = Ticking()
    alone = profile_data(lambda: dataset, 4, clock=dataset.clock)
    assert (alone.load_s, alone.batch_bytes, alone.target_bytes) == (8.0, 4 * (20 + 8), 4 * 8)
    shared = profile_data(lambda: DataLoader(dataset, num_workers=2), 4, clock=dataset.clock)
    assert shared.load_s == 4.0


def test_memory_is_that_of_shards_or_of_what_is_sent() -> None:
    tensors = TensorDataset(torch.zeros(100, 1000), torch.zeros(100))
    assert profile_data(tensors, 2).resident_bytes == 100 * 4004
    pickled = profile_data([(torch.zeros(1000), "a") for _ in range(4)], 1, batches=1)
    assert 2 * 4 * 4000 <= pickled.resident_bytes < 2 * 4 * 4000 + 5000


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(DataError, match="has 3 samples, too few for one micro-batch of 4"):
        profile_data(TensorDataset(torch.zeros(3, 2), torch.zeros(3)), 4)


def test_generators_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    profile_data([(torch.zeros(2), "x")] * 3, 1)
    assert torch.equal(torch.rand(1), expected)
