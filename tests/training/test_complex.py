"""Complex parameters: trained over stages and replicas as in one process, with clipping, ties and checkpoints."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.core import Routes
from funcpipe.errors import PlanError
from funcpipe.model.graph import trace
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizer_division import check_sharding
from funcpipe.training.optimizers import trainable_shapes
from funcpipe.training.state import capture_state
from tests.e2e.plans import even_plan
from tests.in_process import train_both

adam = partial(torch.optim.Adam, lr=0.02)


class Spectral(nn.Module):
    """Filters of the spectrum, one of them used twice; the values between are complex too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=dtype.to_real())
        self.filter = Filter(dtype)
        self.middle = nn.Linear(8, 8, dtype=dtype)
        self.again = Filter(dtype)
        self.again.weight = self.filter.weight
        self.last = nn.Linear(8, 3, dtype=dtype.to_real())

    def forward(self, x: Tensor) -> Any:
        spectrum = self.filter(torch.fft.fft(self.first(x)))
        return self.last(torch.fft.ifft(self.again(self.middle(spectrum))).real)


class Filter(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=dtype))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight


def data(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, generator=generator, dtype=dtype.to_real()), torch.tensor(i % 3)) for i in range(14)]


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [
        *((torch.complex64, None), (torch.complex128, 0.1)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((torch.complex64, 0.1), (torch.complex128, None))),
    ],
)
def test_complex_parameters_train_over_replicas_as_in_one_process(dtype: torch.dtype, clip: float | None) -> None:
    torch.manual_seed(0)
    model, loss = Spectral(dtype), nn.functional.cross_entropy
    sample = (torch.zeros(2, 6, dtype=dtype.to_real()),)
    plan = even_plan(model, sample, stages=3, replicas=2, micro_batch=2, micro_batches=2)
    workers, expected = train_both(model, plan, partial(data, dtype), loss=loss, optimizer=adam, clip_grad_norm=clip)
    tolerance = 1e-4 if dtype is torch.complex64 else 1e-9
    for worker in workers.values():
        for name, tensor in worker.computation.state().state_dict().items():
            torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_checkpoint_holds_complex_parameters(dtype: torch.dtype) -> None:
    model = Spectral(dtype)
    checkpoints = Checkpoints(MemoryStorage(), Keys("run-1"))
    checkpoints.save(0, 1, capture_state(model, adam(model.parameters()), GradientNorm()), writer="w")
    checkpoints.mark_done((0, 0), 1)
    _, state = checkpoints.load_latest((0, 0))
    assert state is not None
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.state_dict().items())


def test_an_optimiser_of_complex_parameters_is_not_divided() -> None:
    graph = trace(Spectral(torch.complex64), (torch.zeros(2, 6),))
    with pytest.raises(PlanError, match=r"parameters are complex, as .*weight is; plan without shard_optimizer"):
        check_sharding(adam, trainable_shapes(graph.module), [], Routes(activations=(), gradients=()))
