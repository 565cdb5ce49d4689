"""What an invocation has held is given back before its environment waits for the next one."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.core import to_text
from funcpipe.errors import WorkerFailed
from funcpipe.platforms import entry, entry_aliyun, entry_aws
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import Invoked
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.shared.cloud import SECRET, KeyWrap
from funcpipe.runstate.keys import Keys
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.support.run_keys import NONCE


class Client(FileStorage):
    """A storage that is part of a circle, as clients of clouds are."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.itself = self


class Context:
    aws_request_id = "request"

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How many storages there were each time that memory was given back."""
    opened: weakref.WeakSet[Client] = weakref.WeakSet()
    held: list[int] = []

    def open_storage(*_: Any, **__: Any) -> Client:
        opened.add(client := Client(tmp_path))
        return client

    monkeypatch.setenv(SECRET, "of the deployment")
    monkeypatch.setenv(entry_aws.CONTROL, "control")
    for module in (entry_aws, entry):
        monkeypatch.setattr(module, "open_storage", open_storage)
    monkeypatch.setattr(allocator, "trim", lambda: held.append(len(opened)))
    return held


def payload(storage: FileStorage, loss: Any = F.cross_entropy) -> str:
    torch.manual_seed(0)
    job = make_job(small.model(), small.plan(1, 1), small.data, loss=loss, optimizer=small.optimizer)
    (spec,) = upload(prepared_run(job, storage), Keys("run-1", 0, NONCE))
    return to_text(replace(spec, run_key=KeyWrap("of the deployment").wrap(spec.run_key)))


def test_a_function_of_lambda_holds_no_client_when_it_gives_memory_back(held: list[int], tmp_path: Path) -> None:
    entry_aws.handler(json.loads(payload(FileStorage(tmp_path))), Context())
    assert held == [0]


def test_a_function_of_lambda_that_fails_gives_memory_back(held: list[int], tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed):
        entry_aws.handler(json.loads(payload(FileStorage(tmp_path), small.failing_loss)), Context())
    assert len(held) == 1


@pytest.mark.parametrize("loss", [F.cross_entropy, small.failing_loss])
def test_a_function_of_function_compute_holds_no_client_when_it_gives_memory_back(
    held: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Any
) -> None:
    answers: list[int] = []
    monkeypatch.setattr(entry_aliyun.Handler, "headers", {}, raising=False)
    monkeypatch.setattr(entry_aliyun.Handler, "_answer", lambda self, status, value: answers.append(status))
    entry_aliyun.Handler._invoke(object.__new__(entry_aliyun.Handler), payload(FileStorage(tmp_path), loss), Invoked())
    assert (held, answers) == ([0], [200 if loss is F.cross_entropy else 404])
