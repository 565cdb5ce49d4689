import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from funcpipe.core import Plan, ScheduleKind, Stage, Sync, Wire, WorkerSpec
from funcpipe.platforms.base import Cause, Handle, State, Status
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local import LocalPlatform


def succeed(payload: str) -> None:
    assert json.loads(payload)["run"] == "run-1"


def fail(payload: str) -> None:
    raise SystemExit(3)


def sleep(payload: str) -> None:
    time.sleep(600)


def spec() -> WorkerSpec:
    plan = Plan(
        global_batch=1,
        micro_batch=1,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=(Stage(first=0, stop=1, size="1024MB", memory_mb=1024),),
    )
    return WorkerSpec(
        run="run-1",
        attempt=0,
        stage=0,
        replica=0,
        plan=plan,
        storage="file:///nowhere",
        bundle="b",
        bundle_sha256="0",
        parameters="p",
        epochs=1,
        seed=0,
        message_deadline_s=1.0,
    )


def ended(platform: LocalPlatform, handle: Handle) -> Status:
    until_s = time.monotonic() + 30
    while platform.status(handle).state is State.RUNNING:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return platform.status(handle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "status"),
    [
        (succeed, Status(state=State.DONE)),
        (fail, Status(state=State.FAILED, reason="ended with exit code 3", cause=Cause.CRASHED)),
    ],
)
def test_a_function_gets_its_payload_and_its_end_is_seen(entry: Callable[[str], None], status: Status) -> None:
    platform = LocalPlatform(load_spec("local"), entry)
    assert ended(platform, platform.invoke(spec())) == status


@pytest.mark.slow
def test_a_killed_function_is_named_with_its_signal_and_stop_returns_when_it_has_ended() -> None:
    platform = LocalPlatform(load_spec("local"), sleep)
    handle, other = platform.invoke(spec()), platform.invoke(spec())
    assert platform.status(handle) == Status(state=State.RUNNING)
    os.kill(int(handle.name.split()[-1]), signal.SIGKILL)
    assert ended(platform, handle) == Status(state=State.FAILED, reason="killed by SIGKILL", cause=Cause.CRASHED)
    platform.stop(other)
    platform.stop(other)
    assert platform.status(other).state is State.FAILED


SCRIPT = """
import os, sys, time
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local import LocalPlatform
from tests.platforms.test_local import sleep, spec
print("main runs", file=sys.stderr)
handle = LocalPlatform(load_spec("local"), sleep).invoke(spec())
print(handle.name.split()[-1], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_functions_end_with_their_client_and_do_not_run_its_script_again(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    client = subprocess.Popen(
        [sys.executable, str(tmp_path / "client.py")],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    function = int(client.stdout.readline())
    time.sleep(0.5)
    client.kill()
    _, errors = client.communicate(timeout=30)
    assert errors.count("main runs") == 1
    until_s = time.monotonic() + 30
    while Path(f"/proc/{function}").exists():
        assert time.monotonic() < until_s
        time.sleep(0.05)
