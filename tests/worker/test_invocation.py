"""What a function does first: read its payload, keep torch's compiler out, become a worker or a probe."""

import json
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import funcpipe.neighbours.parameter_server.function_worker
import funcpipe.profiler.remote.function
import funcpipe.worker.attempt
import funcpipe.worker.watchdog
from funcpipe.core import ProbeSpec, ServerFunctionSpec, WatchSpec, WorkerSpec, to_text
from funcpipe.errors import FormatError, InvalidValue, RunKeyMissing
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.tasks import Kind, Task
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker import invocation
from funcpipe.worker.synchronisation import Synchronisation
from tests.core.test_run import spec
from tests.recording import Recording
from tests.support.run_keys import NONCE, RUN_KEY


def invoke(payload: str, storage: MemoryStorage | None = None) -> None:
    invocation.main(payload, open_storage=lambda url, **_: storage or MemoryStorage(), open_platform=Recording().open)


@pytest.mark.parametrize("payload", ["", "7", "{}", "[]"])
def test_a_payload_without_a_format_is_refused(payload: str) -> None:
    with pytest.raises(FormatError, match="field 'format' is missing"):
        invoke(payload)


@pytest.mark.parametrize("given", ["x/1", 7, None, ["funcpipe.worker/1"], {}])
def test_a_payload_of_another_format_is_refused(given: Any) -> None:
    expected = "'funcpipe.worker/1' or 'funcpipe.server-function/1' or 'funcpipe.probe/1' or 'funcpipe.watch/1'"
    with pytest.raises(FormatError, match=re.escape(f"field 'format' is {given!r}, expected {expected}")):
        invoke(json.dumps({"format": given}))


@pytest.mark.parametrize(
    ("payload_format", "module"),
    [
        (WorkerSpec.FORMAT, funcpipe.worker.attempt),
        (ProbeSpec.FORMAT, funcpipe.profiler.remote.function),
        (ServerFunctionSpec.FORMAT, funcpipe.neighbours.parameter_server.function_worker),
        (WatchSpec.FORMAT, funcpipe.worker.watchdog),
    ],
)
def test_the_format_says_what_the_function_is(
    payload_format: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def main(payload: str, **_: Callable[..., Any]) -> None:
        ran.append(payload)

    monkeypatch.setattr(module, "main", main)
    payload = json.dumps({"format": payload_format})
    invoke(payload)
    assert ran == [payload]


def test_a_worker_that_fails_ends_with_exit_code_1() -> None:
    storage = MemoryStorage()  # without the worker's code
    with pytest.raises(SystemExit) as ended:
        invoke(to_text(replace(spec(), nonce=NONCE, run_key=RUN_KEY.text)), storage)
    assert ended.value.code == 1
    assert len(storage.list(Keys("run-1", 0, NONCE).worker_reports)) == 1


def test_a_worker_that_is_told_no_key_or_another_run_s_does_nothing() -> None:
    storage = MemoryStorage()
    with pytest.raises(InvalidValue, match="run key must be 64 hexadecimal digits"):
        invoke(to_text(replace(spec(), nonce=NONCE)), storage)
    with pytest.raises(RunKeyMissing):
        invoke(to_text(replace(spec(), nonce=NONCE, run_key="ab" * 32)), storage)
    assert storage.list("") == ()


def test_only_tasks_of_a_synchronisation_are_part_of_one() -> None:
    unused: Any = None
    with pytest.raises(InvalidValue, match="must be part of a synchronisation"):
        Synchronisation(unused, unused, 0, str).run(Task(Kind.BUCKET, 0, 0, part=0), unused)


def test_a_function_leaves_its_environment_as_it_found_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def main(payload: str, **_: Any) -> None:
        os.environ["AWS_SECRET_ACCESS_KEY"] = "of a run"
        os.environ.pop("FUNCPIPE_TEST_KEPT")
        os.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_grad_enabled(False)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        raise SystemExit(1)

    monkeypatch.setenv("FUNCPIPE_TEST_KEPT", "kept")
    monkeypatch.setattr(funcpipe.worker.attempt, "main", main)
    variables, place = dict(os.environ), (os.getcwd(), list(sys.path))
    before = torch.get_rng_state()
    with pytest.raises(SystemExit):
        invoke(json.dumps({"format": WorkerSpec.FORMAT}))
    assert (dict(os.environ), (os.getcwd(), sys.path)) == (variables, place)
    assert torch.zeros(1).dtype is torch.float32
    assert torch.zeros(1).device.type == "cpu"
    assert (torch.get_deterministic_debug_mode(), torch.is_grad_enabled()) == (0, True)
    assert torch.equal(torch.get_rng_state(), before)
    others = random.random(), float(np.random.random())
    random.seed(7)
    np.random.seed(7)
    assert others != (random.random(), float(np.random.random()))  # as a new process does not repeat what one drew
