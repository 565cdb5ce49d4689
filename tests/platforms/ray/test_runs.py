"""Whole runs in tasks of a real Ray: nobody can tell from the result, whatever happens on the way."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcpipe import FaultTolerance, FuncPipe, Outcome, Progress, RunInterrupted, RunResult, clean, open_storage, status
from funcpipe.cli import main
from funcpipe.client.follow.callbacks import EachStep
from funcpipe.core import write
from funcpipe.core.logs import merged
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.output import read_logs
from funcpipe.platforms.ray.cluster import RayAddress
from funcpipe.platforms.ray.platform import ray_functions
from tests.e2e import reference, small
from tests.e2e.plans import sample_numbers
from tests.platforms.ray.processes import processes_of, title_of
from tests.support.waiting import LONG_S, wait_until

pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).parents[3]

adam = partial(torch.optim.Adam, lr=0.01)
QUICK = FaultTolerance(heartbeat_s=0.5, lease_s=5.0, checkpoint_steps=4)
PATIENT = FaultTolerance(heartbeat_s=0.5, lease_s=120.0, checkpoint_steps=4)


def pipe(loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> FuncPipe:
    torch.manual_seed(5)
    return FuncPipe(small.model(), loss_fn=loss, optimizer=adam)


def train(
    cluster: RayAddress,
    url: str,
    *,
    replicas: int = 2,
    faults: FaultTolerance = PATIENT,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    run: str | None = None,
    resume: str | None = None,
) -> RunResult:
    """Two stages, for two epochs of eight or sixteen steps."""
    return pipe(loss).train(
        small.data,
        epochs=2,
        plan=small.plan(2, replicas),
        platform=cluster.url,
        storage=url,
        run=run,
        resume=resume,
        faults=faults,
        callbacks=[EachStep(on_progress)],
        rehearse=False,  # which would count the calls of a loss here
    )


@pytest.fixture(scope="module")
def undisturbed(cluster: RayAddress, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(cluster, tmp_path_factory.mktemp("objects").as_uri(), run="undisturbed")


@pytest.fixture(scope="module")
def one_replica(cluster: RayAddress, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(cluster, tmp_path_factory.mktemp("objects").as_uri(), replicas=1, run="undisturbed")


def assert_same(found: RunResult, expected: RunResult) -> None:
    """To the last bit."""
    assert found.losses == expected.losses
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())


def kill(run: str, *workers: str) -> None:
    """End the processes of these functions, or of all of the run."""
    titles = [f"ray::{run}/{worker}" for worker in workers]
    for process in processes_of(run):
        if not titles or title_of(process) in titles:
            process.send_signal(signal.SIGKILL)


def test_two_stages_of_two_replicas_equal_one_process(undisturbed: RunResult) -> None:
    torch.manual_seed(5)
    model = small.model()
    steps = sample_numbers(small.plan(), small.SAMPLES, 2)
    losses = reference.train(model, small.data(), loss_fn=F.cross_entropy, optimizer=adam, steps=steps, replicas=2)
    assert undisturbed.losses == pytest.approx(losses, rel=1e-6)
    assert reference.largest_difference(undisturbed.state_dict(), model.state_dict()) < 1e-6
    assert [report.outcome for report in undisturbed.workers] == [Outcome.FINISHED] * 4


def test_fit_plans_no_function_that_the_cluster_has_no_room_for(cluster: RayAddress, tmp_path: Path) -> None:
    """Functions cost nothing there: the best plan on any cluster has a function of 16 vCPUs, the cluster has eight."""
    found = pipe()
    result = found.fit(
        small.data(),
        global_batch=4,
        micro_batch=2,
        time_value=1.0,
        platform=cluster.url,
        storage=tmp_path.as_uri(),
        progress=False,
    )
    assert len(result.losses) == small.SAMPLES // 4
    assert found._plan is not None
    with ray_functions(cluster, load_spec("ray")) as functions:
        assert functions.offer.has_room(found._plan)


def test_killed_functions_are_replaced(
    cluster: RayAddress, gates: Path, tmp_path: Path, undisturbed: RunResult
) -> None:
    killed: list[str] = []

    def disturb(progress: Progress) -> None:
        if progress.step in (4, 6):
            killed.append(("s0.r1", "s1.r0")[len(killed)])
            kill("disturbed", killed[-1])
            small.open_gates(*{2: [1, 2, 3]}.get(len(killed), []))

    found = train(cluster, tmp_path.as_uri(), run="disturbed", loss=small.gated_loss, on_progress=disturb)
    assert killed == ["s0.r1", "s1.r0"]
    assert_same(found, undisturbed)
    assert found.bill.functions >= 4 + 2


@pytest.mark.long
def test_functions_with_short_lives_hand_over(cluster: RayAddress, tmp_path: Path, one_replica: RunResult) -> None:
    """Four functions while they do: 32 steps take 16 s and more."""
    faults = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, lifetime_s=12.0, cold_start_s=0.5)
    found = train(cluster, tmp_path.as_uri(), replicas=1, run="short", faults=faults, loss=small.very_slow_loss)
    assert_same(found, one_replica)
    ended = Counter((report.worker, report.outcome) for report in found.workers)
    for worker in ("s0.r0", "s1.r0"):
        assert ended[worker, Outcome.HANDED_OVER] >= 1
        assert ended[worker, Outcome.FINISHED] >= 1  # so does a successor that was not needed


def test_a_run_that_is_left_to_itself_outlives_the_death_of_all_its_functions(
    cluster: RayAddress, gates: Path, tmp_path: Path, undisturbed: RunResult
) -> None:
    """And of its watchdog. Then it is collected."""
    url, storage = tmp_path.as_uri(), open_storage(tmp_path.as_uri())
    run = pipe(small.gated_loss).start(
        small.data,
        epochs=2,
        plan=small.plan(),
        platform=cluster.url,
        storage=url,
        run="left",
        faults=QUICK,
        rehearse=False,
    )
    wait_until(lambda: [worker for worker in status(storage, run).workers if worker.step >= 4])
    wait_until(lambda: len(processes_of(run)) == 5)
    kill(run)
    small.open_gates(1, 2, 3)
    wait_until(lambda: {worker.outcome for worker in status(storage, run).workers} == {Outcome.FINISHED})
    assert all(worker.attempt for worker in status(storage, run).workers)
    wait_until(lambda: not processes_of(run))  # the watchdog ends with the run
    found = pipe().train(small.data, epochs=2, plan=small.plan(), platform=cluster.url, storage=url, resume=run)
    assert_same(found, undisturbed)
    assert clean(storage, run) > 0
    assert storage.list("") == ()


def test_ray_leaves_sigterm_to_the_program_and_an_interrupted_run_is_resumed(
    cluster: RayAddress, tmp_path: Path, one_replica: RunResult
) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # as the program had it before Ray was started

    def interrupt(progress: Progress) -> None:
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunInterrupted) as caught:
        train(cluster, tmp_path.as_uri(), replicas=1, run="interrupted", on_progress=interrupt)
    assert caught.value.saved_step is not None
    wait_until(lambda: not processes_of("interrupted"))
    assert_same(train(cluster, tmp_path.as_uri(), replicas=1, resume="interrupted"), one_replica)


def test_a_run_that_was_left_to_itself_is_shown_logged_stopped_and_deleted_in_a_shell(
    cluster: RayAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = (tmp_path / "objects").as_uri()
    pipe().start(
        small.data,
        epochs=100_000,
        plan=small.plan(),
        platform=cluster.url,
        storage=url,
        run="shell",
        faults=PATIENT,
        rehearse=False,
    )
    where = ["shell", "--storage", url]

    def said(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 0
        return capsys.readouterr().out

    wait_until(lambda: [worker for worker in json.loads(said("status", *where, "--json"))["workers"] if worker["step"]])
    stopped = json.loads(said("stop", *where, "--json"))
    assert {worker["outcome"] for worker in stopped["workers"]} == {"halted"}
    wait_until(lambda: not processes_of("shell"))  # nor its watchdog
    lines = [json.loads(line) for line in said("logs", *where, "--json").splitlines()]
    assert {line["worker"] for line in lines} >= {"s0.r0", "s0.r1", "s1.r0", "s1.r1"}
    assert said("clean", *where)


def test_ray_that_is_started_for_a_run_ends_with_it_and_its_logs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as a process has one Ray."""
    write(small.plan(1, 1), tmp_path / "plan.json")
    job = ["train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")]
    job += ["--platform", "ray://local?cpus=1", "-o", str(tmp_path / "model.safetensors"), "--run", "alone"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray would put a token into the home folder
    client = subprocess.Popen([sys.executable, "-m", "funcpipe", *job], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert client.wait(LONG_S) == 0
    assert not [process for process in psutil.process_iter() if client.pid in [p.pid for p in parents_of(process)]]
    assert {line.worker for line in merged("alone", read_logs("alone"))} == {"client", "s0.r0"}


def parents_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.parents()
        return found
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--platform", "ray://auto"], "storage must be given for a cluster: a folder that all of its nodes share"),
        (["--platform", "ray://local", "--detach", "--storage", "file:///tmp/x"], "no run can be left to itself there"),
        (["--platform", "ray://local", "--like", "aws-lambda"], "like is for the platform 'local'"),
        (["--platform", "ray://head"], "must be ray://local, ray://auto"),
    ],
)
def test_what_ray_cannot_do_is_told_before_it_is_started(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(small.plan(), tmp_path / "plan.json")
    job = ["train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")]
    assert main([*job, *words, "-o", str(tmp_path / "model.safetensors")]) == 2
    assert message in capsys.readouterr().err
