"""What a function does first: read its payload, keep torch's compiler out, become a worker or a probe."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import funcpipe.parameter_server.function_worker
import funcpipe.profiler.remote.function
import funcpipe.worker.attempt
import funcpipe.worker.watchdog
from funcpipe.core import ProbeSpec, ServerFunctionSpec, WatchSpec, WorkerSpec, to_text
from funcpipe.errors import FormatError, InvalidValue, RunKeyMissing
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.tasks import Kind, Task
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.run_keys import NONCE, RUN_KEY
from funcpipe.worker import deferred_compiler, invocation
from funcpipe.worker.synchronisation import Synchronisation
from tests.core.test_run import spec
from tests.recording import Recording


def invoke(payload: str, storage: MemoryStorage | None = None) -> None:
    invocation.main(payload, open_storage=lambda url, **_: storage or MemoryStorage(), open_platform=Recording().open)


@pytest.mark.parametrize("payload", ["", "7", "{}", "[]"])
def test_a_payload_without_a_format_is_refused(payload: str) -> None:
    with pytest.raises(FormatError, match="field 'format' is missing"):
        invoke(payload)


def test_a_payload_of_another_format_is_refused() -> None:
    expected = r"'funcpipe.worker/1' or 'funcpipe.server-function/1' or 'funcpipe.probe/1' or 'funcpipe.watch/1'"
    with pytest.raises(FormatError, match=rf"field 'format' is 'x/1', expected {expected}"):
        invoke(json.dumps({"format": "x/1"}))


@pytest.mark.parametrize(
    ("payload_format", "module"),
    [
        (WorkerSpec.FORMAT, funcpipe.worker.attempt),
        (ProbeSpec.FORMAT, funcpipe.profiler.remote.function),
        (ServerFunctionSpec.FORMAT, funcpipe.parameter_server.function_worker),
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


def test_stand_ins_give_way_to_the_real_module_when_more_is_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes"):
        monkeypatch.setitem(sys.modules, name, sys)  # remembers what is there, to be restored
        monkeypatch.delitem(sys.modules, name)
    deferred_compiler.defer_compiler()
    compiler, shapes = sys.modules["torch._dynamo"], sys.modules["torch.fx.experimental.symbolic_shapes"]
    deferred_compiler.defer_compiler()
    assert sys.modules["torch._dynamo"] is compiler
    compiler.graph_break()
    assert compiler.disable(len) is len
    assert compiler.disable(recursive=False)(len) is len
    assert shapes.expect_true(True)
    assert shapes.sym_eq((2, 3), (2, 3))
    with pytest.raises(AttributeError):
        _ = compiler.__wrapped__


def test_a_stand_in_is_replaced_by_the_module_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import colorsys

    stand_in = deferred_compiler._Compiler("colorsys")
    monkeypatch.setitem(sys.modules, "colorsys", stand_in)
    assert stand_in.rgb_to_hsv(0, 0, 0) == colorsys.rgb_to_hsv(0, 0, 0)
    assert sys.modules["colorsys"] is not stand_in
    assert stand_in.hsv_to_rgb(0, 0, 0) == (0, 0, 0)


def test_only_tasks_of_a_synchronisation_are_part_of_one() -> None:
    unused: Any = None
    with pytest.raises(InvalidValue, match="must be part of a synchronisation"):
        Synchronisation(unused, unused, 0, str).run(Task(Kind.BUCKET, 0, 0, part=0), unused)
