"""The losses that a run leaves in its storage, whether it was collected or not."""

import pytest

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress
from funcpipe.core import RunSettings
from funcpipe.errors import RunUnknown
from funcpipe.neighbours.provisioning.fit_loss import run_curve
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.test_keeping import prepared, train
from tests.client.threads import RUN, job

pytestmark = pytest.mark.usefixtures("traced")


def test_the_losses_of_a_finished_run(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    result = train(storage, functions, epochs=2)
    found = run_curve(RUN, storage=storage)
    assert found.losses == result.losses
    assert found.steps == tuple(range(1, len(result.losses) + 1))
    assert found.batch == job().plan.global_batch


def test_the_losses_of_a_run_that_still_trains(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    told: list[tuple[int, tuple[float, ...]]] = []

    def look(progress: Progress) -> None:
        told.append((progress.step, run_curve(RUN, storage=storage).losses))

    result = launch(prepared(storage, functions, RunSettings(name=RUN), epochs=2), look)
    assert len(told) == len(result.losses)
    for step, losses in told:
        assert len(losses) >= step
        assert losses == result.losses[: len(losses)]


def test_a_run_that_is_not_there(storage: MemoryStorage) -> None:
    with pytest.raises(RunUnknown, match=RUN):
        run_curve(RUN, storage=storage)
