"""A program that is asked to end, as systemd and Slurm ask all processes of a job at once: what runs is saved."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn import functional as F

from funcpipe import FaultTolerance, FuncPipe, Progress, RunInterrupted, open_storage, status
from funcpipe.client.control.verdict import Verdict
from funcpipe.client.follow import interruption
from funcpipe.client.follow.callbacks import EachStep
from tests.e2e import small
from tests.support.processes import functions_of, hosts_of

SELDOM = FaultTolerance(heartbeat_s=0.5, lease_s=60.0, checkpoint_steps=10_000)
"""Nothing is saved but what is ordered."""


@pytest.fixture(autouse=True)
def a_new_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Signals to end do what they do in a new program; temporary files have a folder of their own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(interruption, "_BEATS", 1000)  # a busy machine has time to save
    yield
    signal.signal(signal.SIGTERM, before)


def end_all(progress: Progress) -> None:
    """Do to all processes of the program what its supervisor does to end it."""
    if progress.step == 6:
        this = os.getpid()
        try:
            hosts, functions = hosts_of(this), functions_of(this)
            for process in (*functions, *hosts, *(psutil.Process(host).ppid() for host in hosts)):
                os.kill(process, signal.SIGTERM)
            assert len(functions) == 4
        finally:
            os.kill(this, signal.SIGTERM)


def test_a_program_that_is_asked_to_end_saves_its_run_and_leaves_nothing_else(tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    before = {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}
    with pytest.raises(RunInterrupted) as caught:
        pipe.train(
            small.data,
            plan=small.plan(),
            epochs=100_000,
            storage=url,
            run="ended",
            faults=SELDOM,
            callbacks=[EachStep(end_all)],
            progress=False,
        )
    saved, steps = caught.value.saved_step, 100_000 * 8
    assert saved is not None
    assert saved > 6
    assert str(caught.value).endswith(f"training ended: it was stopped, and step {saved} of {steps} is saved")
    assert f"pipe.train(dataset, ..., resume='ended', storage='{url}')" in caught.value.__notes__[0]
    found = status(open_storage(url), "ended")
    assert (found.verdict, found.saved_step) == (Verdict.STOPPED, saved)
    assert {worker.attempt for worker in found.workers} == {0}  # no function has died
    assert functions_of(os.getpid()) == []
    assert list((tmp_path / "temporary").glob("funcpipe-*")) == []
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.model.state_dict().items())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
