"""What the tests of the API's verbs share: functions that are threads, a small model, its data, and a script's loop."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from funcpipe.api import fitting, training
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time

SAMPLES, GLOBAL_BATCH = 20, 8


@contextlib.contextmanager
def functions_in_threads() -> Iterator[MemoryStorage]:
    storage = MemoryStorage()
    platform = ThreadPlatform(load_spec("local"), storage)

    @contextlib.contextmanager
    def session(*_: Any, **__: Any) -> Iterator[Session]:
        made = session_on(Site(platform, storage, "memory://"), reopen=platform.open)
        yield replace(made, lasts=True)  # so that finished runs are kept

    with (
        one_at_a_time(),
        mock.patch.object(training, "open_session", session),
        mock.patch.object(fitting, "open_session", session),
    ):
        yield storage
    platform.stop_all()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64), torch.randint(3, (SAMPLES,), generator=draw)
    )


def script(
    model: nn.Module, optimizer: Optimizer, scheduler: Any = None, *, epochs: int, drop_last: bool = False
) -> None:
    """Train as a script of torch does."""
    for _ in range(epochs):
        for inputs, targets in DataLoader(data(), batch_size=GLOBAL_BATCH, drop_last=drop_last):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
        if scheduler is not None:
            scheduler.step()


def numbers(value: Any) -> list[float]:
    """All numbers in a state_dict, in order."""
    if isinstance(value, Tensor):
        return [float(one) for one in value.flatten()]
    if isinstance(value, dict):
        return [one for item in value.values() for one in numbers(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []
