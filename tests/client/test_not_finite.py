"""A model that diverges: losses and parameters that are no numbers travel like any others, to the result."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from funcpipe.cli.render.output import as_json
from funcpipe.client.control import status
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import Progress, RunResult
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, RunSettings, to_text
from funcpipe.errors import WorkerFailed
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing import chaos
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.passes import LossFunction

FAULTS = FaultTolerance(heartbeat_s=0.05, lease_s=30.0, checkpoint_steps=1, keep=True)


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() * math.nan


def infinite(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * 0 + math.inf


def train(
    functions: ThreadPlatform, storage: MemoryStorage, loss: LossFunction, seen: list[Progress], settings: RunSettings
) -> RunResult:
    job = dataclasses.replace(chaos.job(), loss=loss, epochs=2, clip_grad_norm=1.0)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)

    def interrupted(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == 2 and settings.name is not None:
            raise WorkerFailed("here")

    return launch(prepare(job, session, faults=FAULTS, settings=settings), interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [not_a_number, infinite])
def test_a_run_whose_loss_is_no_number_is_resumed_and_ends_like_any_other(loss: LossFunction) -> None:
    storage, seen = MemoryStorage(), list[Progress]()
    functions = ThreadPlatform(load_spec("local"), storage)
    with pytest.raises(WorkerFailed, match="here"):
        train(functions, storage, loss, seen, RunSettings(name="run-1"))
    json.loads(to_text(status(storage, "run-1")), parse_constant=pytest.fail)
    result = train(functions, storage, loss, seen, RunSettings(resume="run-1"))
    assert len(result.losses) == 6
    assert not any(math.isfinite(loss) for loss in result.losses)
    assert not any(math.isfinite(progress.loss) for progress in seen)
    json.loads(as_json({"losses": result.losses}), parse_constant=pytest.fail)
    if loss is not_a_number:
        assert all(bool(torch.isnan(tensor).all()) for tensor in result.tensors.values() if tensor.is_floating_point())
