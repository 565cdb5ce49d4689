"""Functions on Function Compute: refused before they cost anything, really run, and their ends recognised."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from funcpipe.client.follow.launch import launch, upload
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, open_session, session_on
from funcpipe.core import Plan, PlatformSpec, RunSettings, WorkerReport, WorkerSpec
from funcpipe.errors import DeadlineExceeded, PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.base import Cause, Handle, State, Status
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.function_group import invoke_with_retry
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.shared.cloud import BUSY_FOR_S, Polling
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.cloud_emulation.processes import in_clean_folder
from tests.e2e import small
from tests.in_process import make_job, prepared_run, run_workers
from tests.platforms.aliyun.conftest import EVERY_S, OFTEN, SIZE, sized
from tests.platforms.kept_logs import assert_logs_are_kept
from tests.support.run_keys import NONCE, signed_for_tests


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


def test_an_instance_loads_torch_before_its_first_event(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    cloud.start = in_clean_folder
    for _ in range(2):
        assert ended(platform, platform.invoke(worker(platform, url))).state is State.DONE
    (instance,) = set(cloud.instances.values())
    assert instance.paths == ["/initialize", "/invoke", "/invoke"]


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


def test_stop_ends_a_function_and_may_be_repeated(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    handle = platform.invoke(worker(platform, url, small.sleeping_loss))
    while not cloud.instances:
        time.sleep(EVERY_S)
    platform.stop(handle)
    platform.stop(handle)
    assert platform.status(handle).reason.startswith("stopped")


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


def test_a_service_that_does_not_answer_has_lost_no_function_until_that_lasts(
    deployed: Account, spec: PlatformSpec, cloud: AliyunCloud
) -> None:
    now_s = [0.0]
    platform = AliyunPlatform(spec, deployed, polling=replace(OFTEN, clock=lambda: now_s[0]))
    cloud.lose_answer = lambda call: True
    assert platform.status(Handle(worker="s0.r0", name="f/t")).state is State.RUNNING
    assert cloud.calls.count("GetAsyncTask") == 5
    now_s[0] = BUSY_FOR_S
    with pytest.raises(PlatformBusy, match=r"asking for the state of f/t: .*is the region right, and this machine on"):
        platform.status(Handle(worker="s0.r0", name="f/t"))


def test_a_function_that_finds_no_room_is_started_later_and_once(
    platform: AliyunPlatform, url: str, cloud: AliyunCloud, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.refuse = lambda call: (
        "ResourceExhausted" if call == "InvokeFunction" and cloud.calls.count(call) < 6 else None
    )
    handle = invoke_with_retry(platform, worker(platform, url, small.sleeping_loss))
    assert len(cloud.tasks) == 1
    assert "worker s0.r0 cannot be started for now" in caplog.text
    assert "ResourceExhausted" in caplog.text
    platform.stop(handle)


def test_a_task_that_the_service_does_not_know_is_an_error_at_once(platform: AliyunPlatform) -> None:
    with pytest.raises(PlatformError, match="AsyncTaskNotFound"):
        platform.status(Handle(worker="s0.r0", name=f"funcpipe-{SIZE}/t"))


def test_what_the_service_would_not_run_is_refused_before_anything_starts(
    platform: AliyunPlatform, account: Account, spec: PlatformSpec, url: str, cloud: AliyunCloud
) -> None:
    one = worker(platform, url)
    with pytest.raises(PlatformRefused, match=r"payload of worker s0\.r0 has \d+ bytes, .* at most 100; fold layers"):
        AliyunPlatform(replace(spec, max_payload_bytes=100), account).invoke(one)
    with pytest.raises(PlatformRefused, match=r"no function funcpipe-1vCPU-2048MB in cn-test; run: funcpipe deploy al"):
        platform.check(sized(one.plan, "1vCPU-2048MB"))
    double = replace(one.plan, replicas=2, global_batch=2 * one.plan.global_batch)
    with pytest.raises(
        PlatformRefused, match="needs 2 functions at once, an account has 1 instances in cn-test, as far as the"
    ):
        AliyunPlatform(replace(spec, max_functions=1), account).check(double)
    cloud.functions[f"funcpipe-{SIZE}"]["memorySize"] = 512
    with pytest.raises(PlatformRefused, match="has 1 vCPU and 512 MB: it was changed"):
        platform.check(one.plan)
    assert cloud.tasks == {}


def test_functions_that_hand_over_need_room_for_a_successor_before_anything_starts(
    account: Account, deployed: Account, spec: PlatformSpec, cloud: AliyunCloud, caplog: pytest.LogCaptureFixture
) -> None:
    plan = sized(small.plan(2, 2))
    AliyunPlatform(replace(spec, max_functions=4), account).check(plan, run_s=3600.0)
    with pytest.raises(
        PlatformRefused,
        match=r"takes about 90000 s, a function at most 86400 s: .* 4 functions become up to 8, and 5 at least; an "
        r"account has 4 instances in cn-test, as far as the specification knows; plan with --max-functions 2, or look "
        r"in the Quota Center, under General Quotas: request 8 there if it shows fewer, and say what it shows",
    ):
        AliyunPlatform(replace(spec, max_functions=4), account).check(plan, run_s=90_000.0)
    assert not caplog.records
    AliyunPlatform(replace(spec, max_functions=7), account).check(plan, run_s=90_000.0)
    assert "until functions have ended, up to 1 at once, as an account has 7 instances" in caplog.messages[0]
    assert cloud.tasks == {}


def test_a_function_whose_image_is_being_made_ready_is_waited_for(
    platform: AliyunPlatform, account: Account, spec: PlatformSpec, cloud: AliyunCloud
) -> None:
    plan, name = sized(small.plan(1, 1)), f"funcpipe-{SIZE}"
    pending, updating = {"state": "Pending", "stateReason": "caching"}, {"lastUpdateStatus": "InProgress"}
    cloud.preparing[name] = [pending, pending, updating]
    before = cloud.calls.count("GetFunction")
    platform.check(plan)
    assert cloud.calls.count("GetFunction") - before == 4
    cloud.preparing[name] = [{"lastUpdateStatus": "Failed", "lastUpdateStatusReason": "no such image"}]
    with pytest.raises(PlatformRefused, match=f"{name} could not be updated: no such image; run: funcpipe deploy"):
        platform.check(plan)
    now_s = iter(range(0, 100_000, 100))
    hasty = AliyunPlatform(spec, account, polling=Polling(every_s=0, clock=lambda: next(now_s), sleep=lambda s: None))
    cloud.preparing[name] = [pending] * 10
    with pytest.raises(DeadlineExceeded, match=f"{name} is Pending after 300 s: caching; try again"):
        hasty.check(plan)


def test_a_specification_that_is_given_says_how_many_functions_the_account_may_run(
    deployed: Account, spec: PlatformSpec, cloud: AliyunCloud
) -> None:
    plan, settings = sized(small.plan(1, 2)), RunSettings(prices=replace(spec, max_functions=1))
    url = f"aliyun-fc://funcpipe?region={deployed.region}&endpoint={cloud.endpoint}"
    with (
        open_session(url, None, settings) as session,
        pytest.raises(
            PlatformRefused, match="an account has 1 instances in cn-test, as far as the specification knows"
        ),
    ):
        session.functions().check(plan)
    with open_session(url, None, replace(settings, prices=replace(spec, max_functions=300))) as session:
        session.functions().check(plan)
        assert session.functions().spec.max_functions == 300


def test_quotas_of_functions_are_kept_from_the_others(
    account: Account, deployed: Account, spec: PlatformSpec, cloud: AliyunCloud
) -> None:
    plan = sized(small.plan(2, 2))
    platform = AliyunPlatform(replace(spec, max_functions=20), account)
    cloud.quotas = {f"another-{number:02}": 1 for number in range(17)}
    with pytest.raises(
        PlatformRefused,
        match=r"needs 4 functions at once, an account has 20 instances in cn-test, .* of which its functions' quotas "
        r"leave 3 to others; plan with --max-functions 3, or look in the Quota Center, .* request 21 there",
    ):
        platform.check(plan)
    cloud.quotas[f"funcpipe-{SIZE}"] = 3
    with pytest.raises(PlatformRefused, match=f"funcpipe-{SIZE} may have 3 instances, its quota in cn-test; set "):
        platform.check(plan)


def test_logs_of_runs_are_kept_apart(platform: AliyunPlatform, url: str, cloud: AliyunCloud) -> None:
    cloud.logs.unfinished = 2
    assert_logs_are_kept(platform, open_storage(url), url, plan=sized(small.plan(1, 1)), wait=lambda: None)
