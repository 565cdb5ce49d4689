"""What tests of profiles share: one thread, and no new processes but where a test is about them."""

import importlib
from collections.abc import Iterator

import pytest
import torch

from funcpipe.core import MB


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Small tensors are fastest on one thread, above all while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _base_memory_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base memory, which takes new processes to measure, is a number."""
    module = importlib.import_module("funcpipe.profiler.profile")
    monkeypatch.setattr(module, "base_memory_bytes", lambda **_: 200 * MB)
