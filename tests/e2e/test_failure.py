"""Failure is loud: it names run, worker and task, and leaves no process and no object behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.cli import main
from funcpipe.core import to_text, write
from funcpipe.errors import DataError, PlanError, WorkerFailed
from tests.e2e import small
from tests.support.processes import functions_of, hosts_of, runs
from tests.support.waiting import LONG_S, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever happens in a test, no function runs and no temporary file is left afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert hosts_of(os.getpid()) == []
    assert list(folder.glob("funcpipe-*")) == []


def pipe(loss: object = F.cross_entropy) -> FuncPipe:
    return FuncPipe(small.model(), loss_fn=loss, optimizer=small.optimizer)  # type: ignore[arg-type]


def test_a_function_that_raises_is_named_with_its_task_and_traceback() -> None:
    with pytest.raises(WorkerFailed) as error:
        pipe(small.failing_loss).train(small.data, plan=small.plan(), rehearse=False)
    message = str(error.value)
    assert re.search(
        r"run run-[0-9a-f-]+: worker s1\.r[01] failed in task forward\.s1\.r[01]\.m[01]: ValueError", message
    )
    assert "the loss function fails" in message
    assert "in failing_loss" in message


def test_a_function_that_fails_before_its_first_task_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"worker s[01]\.r[01] failed outside its tasks: OSError: only in functions"):
        pipe().train(_FailsInFunctions(), plan=small.plan())


class _FailsInFunctions:
    """A dataset factory that works in the process that made it, and nowhere else."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __call__(self) -> object:
        if os.getpid() != self.home:
            raise OSError("only in functions")
        return small.data()


def test_a_message_that_never_comes_ends_the_run_soon_after_its_deadline() -> None:
    began_s = time.monotonic()
    with pytest.raises(WorkerFailed) as error:
        pipe(small.sleeping_loss).train(small.data, plan=small.plan(), message_deadline_s=8, rehearse=False)
    assert re.search(
        r"the work of worker s1\.r[01] is missing: run-.*/00000000/put-gradient\.s1\.r[01]\.m[0-3]\.p0 has not come "
        r"within 8 s.*s0\.r[01] waited for it in task get-gradient\.s0\.r[01]\.m[0-3]\.p1",
        str(error.value),
        flags=re.DOTALL,
    )
    assert time.monotonic() - began_s < 300  # much sooner than its functions would end by themselves


def test_an_interrupt_stops_and_cleans_up(tmp_path: Path) -> None:
    write(small.plan(), tmp_path / "plan.json")
    words = ("train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--epochs", "100000")
    client = subprocess.Popen(
        command(*words, "--plan", str(tmp_path / "plan.json")),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        processes = wait_for_functions(client.pid)
        time.sleep(1)
        os.killpg(client.pid, signal.SIGINT)
        _, errors = client.communicate(timeout=LONG_S)
    finally:
        client.kill()
    assert client.returncode == 1
    assert "interrupted" in errors
    assert "Traceback" not in errors
    wait_until(lambda: not any(runs(pid) for pid in processes))


def wait_for_functions(client: int) -> list[int]:
    """The processes of the four functions, and of their host, once they run."""
    wait_until(lambda: len(functions_of(client)) >= 4)
    return [*hosts_of(client), *functions_of(client)]


def command(*words: str) -> list[str]:
    """The command line in a process of its own, which takes interrupts even where the tests run in the background."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from funcpipe.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False)


def test_the_command_ends_with_1_after_a_failed_run(tmp_path: Path) -> None:
    write(small.plan(), tmp_path / "plan.json")
    ended = run(
        *("train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")),
        *("--loss", "tests.e2e.small:failing_loss", "--set", "training.rehearsal=false"),
    )
    assert ended.returncode == 1
    assert "ValueError: the loss function fails" in ended.stderr


def test_a_plan_for_another_model_is_refused_before_any_function_starts() -> None:
    wrong = FuncPipe(small.other_model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    with pytest.raises(PlanError, match="the plan is for another model"):
        wrong.train(small.data, plan=small.plan())


def test_data_too_short_for_a_batch_is_refused_before_any_function_starts() -> None:
    with pytest.raises(DataError, match="3 samples, too few for one global batch of 8"):
        pipe().train(small.short_data, plan=small.plan())


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"global_batch": 9}, (), "field 'global_batch' must be a multiple of micro_batch x replicas = 2 x 2, got 9"),
        ({}, ("--output", "/dev/null/model.pt"), "/dev/null/model.pt cannot be written: there is no folder /dev/null"),
        ({}, ("--trace", "nowhere/trace.json"), "nowhere/trace.json cannot be written: there is no folder nowhere"),
        ({}, ("--data", "tests.e2e.small:nothing"), "the module tests.e2e.small has no 'nothing'"),
        ({}, ("--data", "tests.e2e.nowhere:data"), "the module tests.e2e.nowhere cannot be imported"),
        ({}, ("--data", "small"), "'small' must read MODULE:FACTORY"),
        ({}, ("--platform", "mars"), "platform must be local"),
    ],
)
def test_bad_input_ends_the_command_with_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    words: tuple[str, ...],
    message: str,
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(to_text(small.plan())) | change))
    assert main(["train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(path), *words]) == 2
    assert message in capsys.readouterr().err


def test_bad_input_ends_the_process_with_2_and_shows_no_traceback(tmp_path: Path) -> None:
    write(small.plan(), tmp_path / "plan.json")
    ended = run("train", "tests.e2e.small:model", "--data", "small", "--plan", str(tmp_path / "plan.json"))
    assert "must read MODULE:FACTORY" in ended.stderr
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
