"""A run that was left to itself, watched by clients that come and go; on real functions of this machine."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from funcpipe import (
    FaultTolerance,
    FuncPipe,
    Outcome,
    PlanError,
    Progress,
    RunInterrupted,
    clean,
    open_storage,
    status,
    stop,
)
from funcpipe.client.follow.callbacks import EachStep
from tests.e2e import small

STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=4)


def pipe() -> FuncPipe:
    torch.manual_seed(5)
    return FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)


def test_an_interrupted_watcher_leaves_the_run_its_module_and_what_was_spent_alone(tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    pipe().start(small.data, plan=small.plan(), epochs=100_000, storage=url, run="watched", faults=STEADY)
    storage = open_storage(url)
    try:
        watcher, seen = pipe(), list[Progress]()
        before = {name: tensor.clone() for name, tensor in watcher.model.state_dict().items()}

        def interrupt(progress: Progress) -> None:
            """End the first watcher at step 12, and the second once it has seen the run's account grow."""
            seen.append(progress)
            grown = progress.cost_usd > seen[0].cost_usd and progress.elapsed_s > seen[0].elapsed_s
            if progress.step == 12 if len(seen) <= 12 else grown:
                raise KeyboardInterrupt

        for _ in range(2):  # the second finds the run as the first has left it
            with pytest.raises(RunInterrupted, match="it goes on"):
                watcher.train(
                    small.data,
                    plan=small.plan(),
                    epochs=100_000,
                    storage=url,
                    resume="watched",
                    callbacks=[EachStep(interrupt)],
                )
        assert all(torch.equal(before[name], tensor) for name, tensor in watcher.model.state_dict().items())
        live = status(storage, "watched")
        assert [worker.outcome for worker in live.workers] == [None] * 4
        assert all(worker.attempt == 0 for worker in live.workers)
        assert [progress.step for progress in seen] == [*range(1, 13), *range(1, len(seen) - 11)]
        with pytest.raises(PlanError, match="run watched still runs; there is nothing to resume"):
            pipe().start(small.data, plan=small.plan(), epochs=100_000, storage=url, resume="watched")
        ended = stop(storage, "watched")
        assert {worker.outcome for worker in ended.workers} == {Outcome.HALTED}
    finally:
        clean(storage, "watched")
    assert storage.list("") == ()
