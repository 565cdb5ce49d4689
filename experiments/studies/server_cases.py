"""The model, the machines and the job of the measurements around a parameter server."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from funcpipe.client.job import Job
from funcpipe.client.server_job import one_stage, stored_job
from funcpipe.model.graph import trace
from funcpipe.parameter_server.ray_actors import RaySite
from funcpipe.parameter_server.values import ServerWorker
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.provision.spotdnn import SpotSystem, SpotType
from funcpipe.training.recipe import Recipe

WIDTH = 500
SLOW_S, FAST_S = 0.08, 0.04  # seconds of a sample
MICRO_BATCH = 10
LINK_MB_S, SERVER_MB_S = 20.0, 40.0
RUN = "measured"


def model(width: int = WIDTH) -> nn.Module:
    """By default 1 MB of parameters, whose computation takes next to nothing."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def model_mb() -> float:
    """The size of the parameters."""
    return sum(parameter.nbytes for parameter in model().parameters()) / 1e6


class Curve:
    """A dataset of noisy values of a smooth function of eight numbers."""

    def __init__(self, samples: int) -> None:
        draw = torch.Generator().manual_seed(4)
        self._x = torch.randn(samples, 8, generator=draw)
        noise = 0.1 * torch.randn(samples, 1, generator=draw)
        self._y = torch.sin(self._x.sum(1, keepdim=True) / 2) + noise

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def job(
    samples: int, global_batch: int, *, micro_batch: int = MICRO_BATCH, lr: float = 0.01, width: int = WIDTH
) -> Job:
    """Train `model(width)` by plain SGD on so many samples, each once."""
    graph = trace(model(width), (torch.zeros(2, 8),))
    return Job(
        graph=graph,
        plan=one_stage([layer.name for layer in graph.layers], global_batch, micro_batch),
        recipe=Recipe(loss=nn.functional.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=lr)),
        dataset=functools.partial(Curve, samples),
        samples=samples,
        epochs=1,
        seed=0,
        shuffle=True,
        message_deadline_s=60.0,
        prices=load_spec("local"),
    )


def site(made: Job, folder: str, server_resources: Mapping[str, float] | None = None) -> RaySite:
    """The server of `made`, with its bandwidth, on a node that has `server_resources`."""
    url = Path(folder).as_uri()
    return RaySite(
        job=stored_job(made, open_storage(url), RUN),
        open_storage=functools.partial(open_storage, url),
        run=RUN,
        server_resources=server_resources or {},
        link_bytes_s=SERVER_MB_S * 1e6,
    )


def spot_system() -> SpotSystem:
    """What spotDNN's model knows of `model()` and the links."""
    return SpotSystem(model_mb=model_mb(), request_mb_s=LINK_MB_S, server_mb_s=SERVER_MB_S)


def spot_type(name: str, sample_s: float, *, usd_h: float, quota: int) -> SpotType:
    """A type of machine that takes `sample_s` for a sample, and pushes after each micro-batch."""
    return SpotType(name=name, batch=MICRO_BATCH, compute_s=MICRO_BATCH * sample_s, gpus=0, usd_h=usd_h, quota=quota)


def worker(name: str, sample_s: float, **settings: object) -> ServerWorker:
    """A machine that takes `sample_s` for a sample, and has a link of its own."""
    return ServerWorker(
        name=name,
        speed=SLOW_S / sample_s,
        sample_s=sample_s,
        link_bytes_s=LINK_MB_S * 1e6,
        **settings,  # type: ignore[arg-type]
    )
