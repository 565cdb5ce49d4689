"""The function's entry under AWS's own runtime client, on the contents of the package that is deployed."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.job import Job
from funcpipe.core import WorkerReport, to_text
from funcpipe.platforms.aws.deployment import lambda_package
from funcpipe.platforms.entry import stop_key
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.shared.cloud import SECRET, KeyWrap
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from tests.cloud_emulation.forks import forked
from tests.cloud_emulation.lambda_runtime import Function, Invocation, one_environment
from tests.cloud_emulation.memory_group import MemoryGroup
from tests.e2e import small
from tests.in_process import make_job, prepared_run, run_workers
from tests.support.run_keys import NONCE, signed_for_tests

DEPLOYMENT = "the secret of a deployment"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("image")
    lambda_package().write(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def function(image: Path, tmp_path: Path) -> Function:
    return Function(
        name="funcpipe-1024",
        image=image,
        handler="funcpipe.platforms.entry_aws.handler",
        memory_mb=1024,
        timeout_s=120,
        environment={"FUNCPIPE_CONTROL": (tmp_path / "control").as_uri(), SECRET: DEPLOYMENT},
    )


def job(epochs: int = 1, loss: Callable[..., Tensor] = F.cross_entropy) -> Job:
    torch.manual_seed(0)
    return make_job(small.model(), small.plan(1, 1), small.data, loss=loss, optimizer=small.optimizer, epochs=epochs)


def invocation(number: int, storage: FileStorage, folder: Path, **options: Any) -> Invocation:
    (spec,) = upload(
        prepared_run(job(**options), storage, storage_url=folder.as_uri(), platform_url="aws-lambda://funcpipe"),
        Keys(f"run-{number}", 0, NONCE),
    )
    wrapped = replace(spec, run_key=KeyWrap(DEPLOYMENT).wrap(spec.run_key))
    return Invocation(request_id=f"request-{number}", payload=to_text(wrapped).encode())


def test_a_worker_trains_in_the_runtime_client_and_again_in_the_same_environment(
    function: Function, tmp_path: Path
) -> None:
    storage = FileStorage(tmp_path)
    with one_environment(function) as (environment, lines):
        for number in range(2):
            event = invocation(number, storage, tmp_path)
            environment.run(event)
            assert (event.status, json.loads(event.answer)) == ("success", {"invocation": f"request-{number}"}), lines
    reference = run_workers(job(), FileStorage(tmp_path / "reference"))["s0.r0"].computation.state().state_dict()
    for number in range(2):
        checkpoints = Checkpoints(signed_for_tests(storage), Keys(f"run-{number}", 0, NONCE))
        found = checkpoints.load(0, checkpoints.index().saved[0][-1][1]).state_dict()
        assert found.keys() == reference.keys()
        assert all(torch.equal(found[name], reference[name]) for name in found)


def test_a_worker_that_fails_is_a_failed_invocation_with_a_report(function: Function, tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    with one_environment(function, forked) as (environment, _):
        event = invocation(0, storage, tmp_path, loss=small.failing_loss)
        environment.run(event)
    assert (event.status, json.loads(event.answer)["errorType"]) == ("failure", "WorkerFailed")
    key = Keys("run-0", 0, NONCE).worker_report("s0.r0", 0)
    report = get_document(signed_for_tests(storage), WorkerReport, key)
    assert "the loss function fails" in str(report.error)


def test_a_key_that_was_wrapped_for_another_deployment_is_refused(function: Function, tmp_path: Path) -> None:
    event = invocation(0, FileStorage(tmp_path), tmp_path)
    refusals = []
    for environment in ({**function.environment, SECRET: "of another deployment"}, {"FUNCPIPE_CONTROL": "file:///"}):
        with one_environment(replace(function, environment=environment), forked) as (one, _):
            attempt = replace(event, ended=threading.Event())
            one.run(attempt)
        refusals.append((attempt.status, json.loads(attempt.answer)["errorMessage"]))
    assert [status for status, _ in refusals] == ["failure", "failure"]
    assert "was not wrapped for this deployment" in refusals[0][1]
    assert "this deployment has no secret" in refusals[1][1]
    assert not FileStorage(tmp_path).list(Keys("run-0", 0, NONCE).leases("s0.r0"))


def test_a_function_that_is_told_to_stop_ends(function: Function, tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    with one_environment(function, forked) as (environment, _):
        event = invocation(0, storage, tmp_path, loss=small.sleeping_loss)
        FileStorage(tmp_path / "control").put(stop_key(event.request_id), b"")
        environment.run(event)
    assert event.error_type == "Runtime.ExitError"
    assert "exit status 77" in json.loads(event.answer)["errorMessage"]


def test_a_function_that_needs_more_than_its_size_is_killed(function: Function, tmp_path: Path) -> None:
    group = MemoryGroup(128)
    group.close()
    if not group.limits:
        pytest.skip("no control group can be made on this machine")
    with one_environment(replace(function, memory_mb=128)) as (environment, _):
        event = invocation(0, FileStorage(tmp_path), tmp_path)
        environment.run(event)
    assert event.error_type == "Runtime.OutOfMemory"
    assert 120 <= event.peak_mb <= 128


def test_an_error_in_the_start_up_phase_is_told(function: Function) -> None:
    with one_environment(replace(function, handler="funcpipe.platforms.entry.nothing.handler")) as (environment, _):
        event = Invocation(request_id="request-0", payload=b"{}")
        environment.run(event)
    assert event.error_type == "Runtime.InitError"
    assert "No module named 'funcpipe.platforms.entry.nothing'" in json.loads(event.answer)["errorMessage"]
