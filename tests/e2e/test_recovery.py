"""Workers that die are replaced, and nobody can tell from the result: with real processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean
from funcpipe.client.follow import launch
from funcpipe.client.follow.callbacks import EachStep
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core import FaultTolerance, Outcome, Plan, RunLimits, RunSettings, write
from funcpipe.errors import RunHalted
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_platform, open_storage
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import load_resume_point
from funcpipe.runstate.signing import signed
from tests.e2e import small
from tests.e2e.plans import even_plan
from tests.support.processes import functions_of, hosts_of
from tests.support.waiting import LONG_S, wait_until

ROOT = Path(__file__).parents[2]


adam = partial(torch.optim.Adam, lr=0.01)
Loss = Callable[[Any, Any], Tensor]
QUICK = FaultTolerance(heartbeat_s=0.5, lease_s=3.0, checkpoint_steps=4)


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are started one after the other, so that processes come in the order of workers."""
    monkeypatch.setattr(launch, "_STARTS_AT_ONCE", 1)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever happens in a test, no function runs and no temporary file is left afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    gates = tmp_path / "gates"
    gates.mkdir()
    monkeypatch.setenv(small.GATES, str(gates))
    yield
    wait_until(lambda: not hosts_of(os.getpid()))  # one that was detached ends by itself
    assert list(folder.glob("funcpipe-*")) == []


def pipe(loss: Loss = F.cross_entropy) -> FuncPipe:
    torch.manual_seed(5)
    return FuncPipe(small.model(), loss_fn=loss, optimizer=adam)


def train(
    faults: FaultTolerance,
    *,
    epochs: int = 4,
    plan: Plan | None = None,
    loss: Loss = F.cross_entropy,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    **options: object,
) -> RunResult:
    return pipe(loss).train(
        small.data,
        epochs=epochs,
        plan=plan or small.plan(),
        faults=faults,
        callbacks=[EachStep(on_progress)],
        rehearse=False,  # which would count the calls of a loss here
        **options,  # type: ignore[arg-type]
    )


def start(url: str, loss: Loss = F.cross_entropy) -> str:
    """The name of a run that was left to itself."""
    settings = RunSettings(storage=url, rehearse=False)
    return pipe(loss).start(small.data, epochs=4, plan=small.plan(), faults=QUICK, settings=settings)


def assert_same(found: RunResult, expected: RunResult) -> None:
    assert found.losses == expected.losses
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def assert_only_the_model_is_kept(storage: Storage, run: str) -> None:
    """Of one generation; and `clean` leaves nothing."""
    prefix = Keys.of(newest_record(signed(storage), run)).prefix
    kept = [key.removeprefix(prefix).partition("/")[0] for key in storage.list("")]
    assert set(kept) == {run, "run.json", "finished.json", "checkpoints", "traces"}
    assert {key.split("/")[1] for key in storage.list("")} == {"generations", "owner", prefix.split("/")[1]}
    assert clean(storage, run) > 0
    assert storage.list("") == ()


@pytest.fixture(scope="module")
def undisturbed() -> RunResult:
    return train(QUICK)


def test_killed_functions_are_replaced_and_the_result_has_the_same_bits(undisturbed: RunResult) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.step in (5, 6, 17):
            victim = functions_of(os.getpid())[len(killed)]
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
            small.open_gates(*{2: [1], 3: [2, 3]}.get(len(killed), []))

    found = train(QUICK, loss=small.gated_loss, on_progress=kill)
    assert len(killed) == 3
    assert_same(found, undisturbed)
    assert found.bill.functions >= 4 + 3


def test_a_function_that_sleeps_is_replaced_and_leaves_when_it_wakes(undisturbed: RunResult) -> None:
    stopped: list[int] = []
    slept_s: list[float] = []

    def stop(progress: Progress) -> None:
        if progress.step == 7:
            stopped.append(functions_of(os.getpid())[0])
            os.kill(stopped[0], signal.SIGSTOP)
            slept_s.append(time.monotonic())
            small.open_gates(1, 2, 3)
        if progress.step == 12:
            os.kill(stopped[0], signal.SIGCONT)

    found = train(QUICK, loss=small.gated_loss, on_progress=stop)
    assert_same(found, undisturbed)
    assert time.monotonic() - slept_s[0] > QUICK.lease_s


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.long), True])
def test_functions_with_short_lives_hand_over(sharded: bool) -> None:
    torch.manual_seed(5)
    slow = FuncPipe(small.model(), loss_fn=small.very_slow_loss, optimizer=adam)  # 8 s of computation: three functions
    faults = FaultTolerance(heartbeat_s=0.2, lease_s=3.0, lifetime_s=4.0, cold_start_s=0.3)
    plan = replace(small.plan(), shard_optimizer=sharded)
    found = slow.train(small.data, epochs=2, plan=plan, faults=faults)
    assert_same(found, train(QUICK, epochs=2))
    ended = Counter((report.worker, report.outcome) for report in found.workers)
    for worker in ("s0.r0", "s0.r1", "s1.r0", "s1.r1"):
        assert ended[worker, Outcome.HANDED_OVER] >= 2
        assert ended[worker, Outcome.FINISHED] >= 1  # so does a successor that was not needed


@pytest.mark.long
def test_a_run_that_would_take_too_long_ends_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    with pytest.raises(RunHalted, match=r"run moved was ended: it would take longer than 10 s"):
        train(
            QUICK, storage=url, run="moved", epochs=10_000, loss=small.very_slow_loss, limits=RunLimits(deadline_s=10.0)
        )
    storage = open_storage(url)
    done = load_resume_point(signed(storage), newest_record(signed(storage), "moved")).step
    assert done > 0
    epochs = done // 8 + 1
    other = even_plan(small.model(), small.sample(), stages=3, replicas=1, micro_batch=2, micro_batches=4)
    moved = train(QUICK, storage=url, resume="moved", epochs=epochs, plan=other)
    expected = train(QUICK, epochs=epochs)
    assert len(moved.losses) == len(expected.losses) == 8 * epochs
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(moved.state_dict()[name], tensor, rtol=1e-3, atol=1e-4), name
    assert_only_the_model_is_kept(storage, "moved")


@pytest.mark.long
def test_a_run_that_is_left_to_itself_can_be_collected(undisturbed: RunResult, tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    run = start(url)
    record = newest_record(signed(open_storage(url)), run)
    assert list_functions(signed(open_storage(url)), Keys.of(record))
    assert open_platform(record.platform).spec.name == "local"
    assert_same(train(QUICK, storage=url, resume=run), undisturbed)
    assert_only_the_model_is_kept(open_storage(url), run)


@pytest.mark.long
def test_a_run_that_is_left_to_itself_outlives_the_death_of_a_function(undisturbed: RunResult, tmp_path: Path) -> None:
    url = (tmp_path / "objects").as_uri()
    storage = open_storage(url)
    run = start(url, loss=small.gated_loss)
    wait_until(lambda: [worker for worker in status(storage, run).workers if worker.step >= 2])
    os.kill(functions_of(os.getpid())[2], signal.SIGKILL)
    small.open_gates(1, 2, 3)
    wait_until(lambda: {worker.outcome for worker in status(storage, run).workers} == {Outcome.FINISHED})
    assert next(worker.attempt for worker in status(storage, run).workers if worker.worker == "s1.r0") >= 1
    assert_same(train(QUICK, storage=url, resume=run), undisturbed)
    assert_only_the_model_is_kept(storage, run)


def test_a_client_that_leaves_holds_on_to_nothing(tmp_path: Path) -> None:
    """`funcpipe train --detach | tee log` ends, although the functions run on."""
    url = (tmp_path / "objects").as_uri()
    write(small.plan(1, 1), tmp_path / "plan.json")
    words = ["train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")]
    words += [
        "--loss",
        "tests.e2e.small:slow_loss",
        "--epochs",
        "100000",
        "--storage",
        url,
        "--run",
        "left",
        "--detach",
    ]
    client = subprocess.run(
        [sys.executable, "-m", "funcpipe", *words, "--detach"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    assert "left" in client.stdout
    assert client.stderr == ""
    assert [worker.outcome for worker in status(open_storage(url), "left").workers] in ([], [None])
    assert clean(open_storage(url), "left", open_platform) > 0


def test_parts_of_a_divided_optimiser_survive_deaths(undisturbed: RunResult) -> None:
    """Every replica's part comes from its own checkpoint, the model of a dead one from the first replica's."""
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.step in (6, 17):
            victim = functions_of(os.getpid())[1 + len(killed)]
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
            small.open_gates(*{1: [1], 2: [2, 3]}[len(killed)])

    plan = replace(small.plan(), shard_optimizer=True)
    assert_same(train(QUICK, plan=plan, loss=small.gated_loss, on_progress=kill), undisturbed)
    assert len(killed) == 2


def test_a_run_that_is_left_to_itself_outlives_the_death_of_all_functions(
    undisturbed: RunResult, tmp_path: Path
) -> None:
    url = (tmp_path / "objects").as_uri()
    storage = open_storage(url)
    run = start(url, loss=small.gated_loss)
    wait_until(lambda: [worker for worker in status(storage, run).workers if worker.step >= 2])
    for victim in functions_of(os.getpid()):  # and the watchdog
        os.kill(victim, signal.SIGKILL)
    small.open_gates(1, 2, 3)
    wait_until(lambda: {worker.outcome for worker in status(storage, run).workers} == {Outcome.FINISHED})
    assert all(worker.attempt for worker in status(storage, run).workers)
    assert_same(train(QUICK, storage=url, resume=run), undisturbed)
    assert_only_the_model_is_kept(storage, run)
