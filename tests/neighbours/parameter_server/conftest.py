"""A small model and its data, as a parameter server's run is given them."""

import functools

import pytest
import torch
from torch import Tensor, nn

from funcpipe.client.prepare.job import Job
from funcpipe.model.graph import trace
from funcpipe.neighbours.parameter_server.server import ServerJob
from funcpipe.neighbours.parameter_server.training import one_stage, stored_job
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.recipe import Recipe

RUN = "run-1"
SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 22, 8, 2


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
    return layers.double()


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(6, generator=draw, dtype=torch.float64), torch.tensor(i % 4)) for i in range(SAMPLES)]


def make_job(recipe: Recipe, epochs: int = 2, made: nn.Module | None = None) -> Job:
    graph = trace(model() if made is None else made, (torch.zeros(2, 6, dtype=torch.float64),))
    return Job(
        graph=graph,
        plan=one_stage([layer.name for layer in graph.layers], GLOBAL_BATCH, MICRO_BATCH),
        recipe=recipe,
        dataset=data,
        samples=SAMPLES,
        epochs=epochs,
        seed=5,
        shuffle=True,
        message_deadline_s=60.0,
        prices=load_spec("local"),
    )


def adam_recipe() -> Recipe:
    return Recipe(
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    )


@functools.cache
def adam_job() -> Job:
    return make_job(adam_recipe())


def stored_adam() -> tuple[Job, ServerJob, MemoryStorage]:
    """The job, what is sent of it, and a storage that holds its data."""
    storage = MemoryStorage()
    return adam_job(), stored_job(adam_job(), storage, RUN), storage


@pytest.fixture
def stored() -> tuple[Job, ServerJob, MemoryStorage]:
    return stored_adam()
