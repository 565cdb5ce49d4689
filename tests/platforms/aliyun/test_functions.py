"""Functions on Function Compute: refused before they cost anything, really run, and their ends recognised."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcpipe.client.job import Job
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.client.upload import upload
from funcpipe.core import Plan, PlatformSpec, WorkerReport, WorkerSpec
from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.functions import AliyunPlatform, status_of
from funcpipe.platforms.base import Cause, Handle, State, Status
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from funcpipe.testing.run_keys import NONCE, signed_for_tests
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.e2e import small
from tests.in_process import make_job, prepared_run, run_workers
from tests.platforms.aliyun.conftest import EVERY_S, SIZE, sized
from tests.platforms.kept_logs import assert_logs_are_kept


@pytest.mark.parametrize(
    ("state", "message", "expected", "cause"),
    [
        ("Enqueued", "", State.RUNNING, None),
        ("Running", "", State.RUNNING, None),
        ("Stopping", "", State.RUNNING, None),
        ("Succeeded", "", State.DONE, None),
        ("Failed", "Function time out after 3 seconds", State.FAILED, Cause.TIMED_OUT),
        ("Failed", "Function instance OOM killed", State.FAILED, Cause.OUT_OF_MEMORY),
        ("Failed", "UnhandledInvocationError: no", State.FAILED, Cause.CRASHED),
        ("Stopped", "", State.FAILED, Cause.CRASHED),
        ("Expired", "", State.FAILED, Cause.CRASHED),
    ],
)
def test_a_task_s_state_tells_state_and_cause(state: str, message: str, expected: State, cause: Cause | None) -> None:
    status = status_of(state, message)
    assert (status.state, status.cause) == (expected, cause)
    assert expected is not State.FAILED or state.lower() in status.reason


def job(plan: Plan, loss: Callable[..., Tensor] = F.cross_entropy) -> Job:
    torch.manual_seed(0)
    return make_job(small.model(), sized(plan), two_steps, loss=loss, optimizer=small.optimizer, deadline_s=120)


def two_steps() -> list[tuple[Tensor, Tensor]]:
    return small.data()[:16]


def worker(platform: AliyunPlatform, url: str, loss: Callable[..., Tensor] = F.cross_entropy) -> WorkerSpec:
    work = replace(job(small.plan(1, 1), loss), prices=platform.spec)
    (spec,) = upload(
        prepared_run(work, open_storage(url), storage_url=url, platform_url="aliyun-fc://funcpipe?region=cn-test"),
        Keys("run-1", 0, NONCE),
    )
    return spec


def ended(platform: AliyunPlatform, handle: Handle) -> Status:
    while (status := platform.status(handle)).state is State.RUNNING:
        time.sleep(EVERY_S)
    return status


@pytest.mark.slow
def test_a_job_trains_on_function_compute_to_the_same_bits(
    platform: AliyunPlatform, spec: PlatformSpec, url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = replace(job(small.plan(2, 2)), prices=spec)
    storage = open_storage(url)
    result = launch(prepare(work, session_on(Site(platform, storage, url))))
    reference: dict[str, Tensor] = {}
    for one in run_workers(work, FileStorage(tmp_path_factory.mktemp("reference"))).values():
        reference |= one.computation.state().state_dict()
    assert result.tensors.keys() == reference.keys()
    assert all(torch.equal(result.tensors[name], reference[name]) for name in reference)
    assert storage.list("") == ()


@pytest.mark.slow
def test_an_instance_loads_torch_before_its_first_event(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    assert ended(platform, platform.invoke(worker(platform, url))).state is State.DONE
    ((_, instance),) = cloud.instances.items()
    assert instance.paths == ["/initialize", "/invoke"]


@pytest.mark.slow
def test_a_worker_that_fails_is_a_failed_task_with_a_report(
    platform: AliyunPlatform, url: str, deployer: Deployer, cloud: AliyunCloud
) -> None:
    handle = platform.invoke(worker(platform, url, small.failing_loss))
    status = ended(platform, handle)
    assert (status.state, status.cause) == (State.FAILED, Cause.CRASHED)
    assert "WorkerFailed" in status.reason
    key = Keys("run-1", 0, NONCE).worker_report("s0.r0", 0)
    report = get_document(signed_for_tests(open_storage(url)), WorkerReport, key)
    assert "the loss function fails" in str(report.error)
    assert [line for line in cloud.lines if line.startswith("FC Invoke Start RequestId: ")]


@pytest.mark.slow
def test_stop_ends_a_function_and_may_be_repeated(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    handle = platform.invoke(worker(platform, url, small.sleeping_loss))
    while not cloud.instances:
        time.sleep(EVERY_S)
    platform.stop(handle)
    platform.stop(handle)
    assert platform.status(handle).reason.startswith("stopped")


@pytest.mark.slow
def test_a_function_past_its_time_is_timed_out(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    cloud.functions[f"funcpipe-{SIZE}"]["timeout"] = 2
    status = ended(platform, platform.invoke(worker(platform, url, small.sleeping_loss)))
    assert (status.state, status.cause) == (State.FAILED, Cause.TIMED_OUT)


def test_a_lost_answer_is_asked_for_again_and_starts_one_function(
    platform: AliyunPlatform, url: str, cloud: AliyunCloud
) -> None:
    cloud.lose_answer = lambda call: cloud.calls.count(call) == 1
    handle = platform.invoke(worker(platform, url, small.sleeping_loss))
    assert platform.status(handle).state is State.RUNNING
    assert [cloud.calls.count(call) for call in ("InvokeFunction", "GetAsyncTask")] == [2, 2]
    assert len(cloud.tasks) == 1
    platform.stop(handle)


def test_a_service_that_never_answers_is_an_error_of_the_platform(platform: AliyunPlatform, cloud: AliyunCloud) -> None:
    cloud.lose_answer = lambda call: True
    with pytest.raises(PlatformError, match=r"asking for the state of f/t: .*is the region right, and this machine on"):
        platform.status(Handle(worker="s0.r0", name="f/t"))
    assert cloud.calls.count("GetAsyncTask") == 5


def test_what_the_service_would_not_run_is_refused_before_anything_starts(
    platform: AliyunPlatform, account: Account, spec: PlatformSpec, url: str, cloud: AliyunCloud
) -> None:
    one = worker(platform, url)
    with pytest.raises(PlatformRefused, match=r"payload of worker s0\.r0 has \d+ bytes, .* at most 100; fold layers"):
        AliyunPlatform(replace(spec, max_payload_bytes=100), account).invoke(one)
    with pytest.raises(PlatformRefused, match=r"no function funcpipe-1vCPU-2048MB in cn-test; run: funcpipe deploy al"):
        platform.check(sized(one.plan, "1vCPU-2048MB"))
    double = replace(one.plan, replicas=2, global_batch=2 * one.plan.global_batch)
    with pytest.raises(PlatformRefused, match="needs 2 functions at once, an account has 1"):
        AliyunPlatform(replace(spec, max_functions=1), account).check(double)
    cloud.functions[f"funcpipe-{SIZE}"]["memorySize"] = 512
    with pytest.raises(PlatformRefused, match="has 1 vCPU and 512 MB: somebody changed it"):
        platform.check(one.plan)
    assert cloud.tasks == {}


@pytest.mark.slow
def test_logs_of_runs_are_kept_apart(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    cloud.logs.unfinished = 2
    assert_logs_are_kept(platform, open_storage(url), url, plan=sized(small.plan(1, 1)), wait=lambda: None)
