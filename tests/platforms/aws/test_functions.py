"""Functions on AWS: refused before they cost anything, run in the real runtime client, and their ends recognised."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from funcpipe.client.follow.launch import launch, upload
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import WorkerSpec
from funcpipe.errors import DeadlineExceeded, PlatformRefused
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.deployment import Deployer
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.base import Cause, Handle, State, Status, Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.function_group import invoke_with_retry
from funcpipe.platforms.shared.cloud import SECRET, KeyWrap, Polling
from funcpipe.runstate.keys import Keys
from tests.cloud_emulation.aws import AwsCloud
from tests.e2e import small
from tests.in_process import make_job, prepared_run, run_workers
from tests.platforms.aws.conftest import BUCKET, EVERY_S, OFTEN, PLATFORM, STORAGE, keys_in
from tests.platforms.kept_logs import assert_logs_are_kept, logs_of
from tests.support.run_keys import NONCE, RUN_KEY
from tests.support.waiting import wait_until


def spec(storage: Storage, loss: Callable[..., Tensor] = torch.nn.functional.cross_entropy) -> WorkerSpec:
    torch.manual_seed(0)
    job = make_job(small.model(), small.plan(1, 1), small.data, loss=loss, optimizer=small.optimizer)
    (found,) = upload(prepared_run(job, storage, storage_url=STORAGE, platform_url=PLATFORM), Keys("run-1", 0, NONCE))
    return found


def ended(platform: AwsPlatform, handle: Handle) -> Status:
    while (status := platform.status(handle)).state is State.RUNNING:
        time.sleep(EVERY_S)
    return status


def test_a_job_trains_on_lambda_to_the_same_bits(platform: AwsPlatform, storage: Storage, cloud: AwsCloud) -> None:
    torch.manual_seed(0)
    job = make_job(
        small.model(),
        small.plan(2, 2),
        two_steps,
        loss=torch.nn.functional.cross_entropy,
        optimizer=small.optimizer,
        deadline_s=120,
    )
    result = launch(prepare(job, session_on(Site(platform, storage, STORAGE))))
    reference: dict[str, Tensor] = {}
    for worker in run_workers(job, open_storage(STORAGE + "-reference")).values():
        reference |= worker.computation.state().state_dict()
    assert result.tensors.keys() == reference.keys()
    assert all(torch.equal(result.tensors[name], reference[name]) for name in reference)
    assert len([call for call in cloud.calls if call.endswith("/invocations")]) == 4


def test_a_worker_that_fails_is_seen_once_and_not_retried(
    platform: AwsPlatform, deployed: Account, cloud: AwsCloud
) -> None:
    handle = platform.invoke(spec(open_storage(STORAGE), small.failing_loss))
    status = ended(platform, handle)
    assert (status.state, status.cause) == (State.FAILED, Cause.CRASHED)
    assert ended(AwsPlatform(load_spec("aws-lambda"), deployed, polling=OFTEN), handle).state is State.FAILED
    lines = [json.loads(line.split(" ", 3)[3]) for line in reports(deployed)]
    assert [line["record"]["requestId"] for line in lines] == [handle.name.split("/")[1]]


def test_what_lambda_records_of_a_failed_invocation_does_not_tell_the_run_s_key(
    platform: AwsPlatform, cloud: AwsCloud
) -> None:
    worker = spec(open_storage(STORAGE), small.failing_loss)
    status = ended(platform, platform.invoke(worker))
    assert status.state is State.FAILED
    record = record_of_failure(cloud)
    objects = {key: body(cloud, key) for key in keys_in(cloud, BUCKET)}
    told = record["requestPayload"]
    assert (told["run"], told["stage"]) == (worker.run, worker.stage)
    assert KeyWrap(secret_of(cloud)).unwrap(told["run_key"]) == worker.run_key == RUN_KEY.text
    for text in [*(data.decode("latin-1") for data in objects.values()), *cloud.lines, *reports(platform._account)]:
        assert worker.run_key not in text
        assert secret_of(cloud) not in text


def record_of_failure(cloud: AwsCloud) -> dict[str, Any]:
    """What Lambda records of the one event that has failed, a while after it logs that the function has ended."""
    wait_until(lambda: records_in(cloud))
    (key,) = records_in(cloud)
    found: dict[str, Any] = json.loads(body(cloud, key))
    return found


def records_in(cloud: AwsCloud) -> list[str]:
    return [key for key in keys_in(cloud, BUCKET) if key.startswith("aws/lambda/async/")]


def body(cloud: AwsCloud, key: str) -> bytes:
    found: bytes = cloud.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return found


def secret_of(cloud: AwsCloud) -> str:
    found = cloud.client("lambda").get_function_configuration(FunctionName="funcpipe-1024")
    return str(found["Environment"]["Variables"][SECRET])


@pytest.mark.usefixtures("changed")
def test_a_function_whose_files_only_root_can_read_does_not_start(platform: AwsPlatform, cloud: AwsCloud) -> None:
    (image,) = cloud.folder.iterdir()
    (image / "funcpipe" / "errors.py").chmod(0o600)
    status = ended(platform, platform.invoke(spec(open_storage(STORAGE))))
    assert status.state is State.FAILED
    assert "Runtime.ImportModuleError" in status.reason


def two_steps() -> list[tuple[Tensor, Tensor]]:
    return small.data()[:16]


def reports(account: Account) -> list[str]:
    return list(Deployer(account).logs("funcpipe", since_s=0, containing="platform.report"))


def test_stop_ends_a_function_and_may_be_repeated(platform: AwsPlatform, cloud: AwsCloud) -> None:
    handle = platform.invoke(spec(open_storage(STORAGE), small.sleeping_loss))
    assert platform.status(handle) == Status(state=State.RUNNING)
    platform.stop(handle)
    platform.stop(handle)
    assert platform.status(handle).state is State.FAILED
    assert not [key for key in keys_in(cloud, BUCKET) if key.startswith("stops/")]


def test_a_function_past_its_time_is_timed_out(platform: AwsPlatform, cloud: AwsCloud) -> None:
    cloud.timeout_s = 4
    status = ended(platform, platform.invoke(spec(open_storage(STORAGE), small.sleeping_loss)))
    assert (status.state, status.cause) == (State.FAILED, Cause.TIMED_OUT)
    assert "timed out after" in status.reason


def test_a_function_that_does_not_end_is_told(deployed: Account, cloud: AwsCloud) -> None:
    now_s = iter(range(0, 100_000, 50))
    polling = Polling(every_s=0, clock=lambda: float(next(now_s)), sleep=lambda s: None)
    platform = AwsPlatform(load_spec("aws-lambda"), deployed, polling=polling)
    with pytest.raises(DeadlineExceeded, match=r"has not ended 90 s after it was asked to; .* 900 s after its start"):
        platform.stop(Handle(worker="s0.r0", name="funcpipe-1024/nobody/1000"))


def test_a_function_that_finds_no_room_is_started_later(
    platform: AwsPlatform, cloud: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(call: str) -> str | None:
        return "TooManyRequestsException" if call.endswith("/invocations") and cloud.calls.count(call) < 6 else None

    cloud.refuse = refuse
    handle = invoke_with_retry(platform, spec(open_storage(STORAGE)))
    assert ended(platform, handle).state is State.DONE
    assert "worker s0.r0 cannot be started for now" in caplog.text
    assert "(the account's concurrency is used up)" in caplog.text


@pytest.mark.usefixtures("changed")
def test_what_lambda_would_not_run_is_refused_before_anything_starts(
    platform: AwsPlatform, deployed: Account, cloud: AwsCloud
) -> None:
    worker = spec(open_storage(STORAGE))
    small_payloads = AwsPlatform(replace(load_spec("aws-lambda"), max_payload_bytes=100), deployed)
    with pytest.raises(PlatformRefused, match=r"payload of worker s0\.r0 has \d+ bytes, .* at most 100; fold layers"):
        small_payloads.invoke(worker)
    stages = tuple(replace(stage, memory_mb=2048, size="2048MB") for stage in worker.plan.stages)
    with pytest.raises(
        PlatformRefused, match=r"no function funcpipe-2048 in us-east-1; run: funcpipe deploy aws --name"
    ):
        platform.check(replace(worker.plan, stages=stages))
    stages = tuple(replace(stage, memory_mb=20_000) for stage in worker.plan.stages)
    with pytest.raises(PlatformRefused, match="functions of 20000 MB, Lambda has 128 to 10240"):
        platform.check(replace(worker.plan, stages=stages))
    cloud.limits.concurrency = 10
    many = replace(worker.plan, replicas=11, global_batch=11 * worker.plan.micro_batch)
    with pytest.raises(
        PlatformRefused,
        match=r"needs 11 functions at once, this account may run 10 in us-east-1; .* --quota-code L-B99A9384 .*11 ",
    ):
        platform.check(many)
    cloud.client("lambda").update_function_configuration(FunctionName="funcpipe-1024", MemorySize=512)
    with pytest.raises(PlatformRefused, match="funcpipe-1024 has 512 MB: it was changed"):
        platform.check(worker.plan)
    assert not [call for call in cloud.calls if call.endswith("/invocations")]


def test_functions_that_hand_over_need_room_for_a_successor_before_anything_starts(
    platform: AwsPlatform, cloud: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    plan = small.plan(2, 2)
    cloud.limits.concurrency = 4
    platform.check(plan, run_s=600.0)
    assert not caplog.records
    with pytest.raises(
        PlatformRefused,
        match=r"4 functions become up to 8, and 5 at least; this account may run 4 in us-east-1; plan with "
        r"--max-functions 2, or request 8 of .* --quota-code L-B99A9384 --desired-value 8 ",
    ):
        platform.check(plan, run_s=3600.0)
    cloud.limits.concurrency = 6
    platform.check(plan, run_s=3600.0)
    assert "until functions have ended, up to 2 at once, as this account may run 6 in us-east-1" in caplog.messages[0]
    assert not [call for call in cloud.calls if call.endswith("/invocations")]


@pytest.mark.usefixtures("changed")
def test_a_function_s_own_concurrency_is_not_the_account_s(platform: AwsPlatform, cloud: AwsCloud) -> None:
    plan = small.plan(2, 2)
    cloud.reserve("funcpipe-1024", 3)
    with pytest.raises(
        PlatformRefused,
        match=r"needs 4 functions at once, funcpipe-1024 may run 3 times, its reserved concurrency in us-east-1; "
        r"reserve 4: aws lambda put-function-concurrency --function-name funcpipe-1024 .*executions 4 --region us-east",
    ):
        platform.check(plan)
    cloud.reserve("funcpipe-1024", 8)
    cloud.limits.concurrency = 8
    platform.check(plan, run_s=3600.0)


@pytest.mark.usefixtures("changed")
def test_a_plan_for_other_processors_is_refused_before_anything_starts(platform: AwsPlatform, cloud: AwsCloud) -> None:
    plan = small.plan(1, 1)
    way_out = "plan again with --platform"
    with pytest.raises(
        PlatformRefused, match=f"for aws-lambda-arm, .*arm64.*; funcpipe-1024 has x86_64: {way_out} aws-lambda$"
    ):
        platform.check(replace(plan, platform="aws-lambda-arm"))
    platform.check(replace(plan, platform="aws-lambda"))
    functions = cloud.client("lambda")
    like = functions.get_function(FunctionName="funcpipe-1024")
    functions.create_function(
        FunctionName="funcpipe-2048",
        MemorySize=2048,
        Architectures=["arm64"],
        PackageType="Image",
        Code={"ImageUri": like["Code"]["ImageUri"]},
        Role=like["Configuration"]["Role"],
    )
    stages = tuple(replace(stage, memory_mb=2048, size="2048MB") for stage in plan.stages)
    arm = replace(plan, stages=stages, platform="aws-lambda-arm")
    platform.check(arm)
    with pytest.raises(
        PlatformRefused, match=f"for aws-lambda, .*x86_64.*; funcpipe-2048 has arm64: {way_out} aws-lambda-arm$"
    ):
        platform.check(replace(arm, platform="aws-lambda"))
    assert not [call for call in cloud.calls if call.endswith("/invocations")]


def test_logs_of_runs_are_kept_apart_in_one_environment(
    platform: AwsPlatform, storage: Storage, cloud: AwsCloud
) -> None:
    def wait() -> None:
        """Until Lambda has written its report, and the environment may be used again."""
        while len(cloud.idle) < 1:
            time.sleep(0.05)

    assert_logs_are_kept(platform, storage, STORAGE, plan=small.plan(1, 1), wait=wait)
    assert len(cloud.environments) == 1
    assert any('"platform.report"' in line.text for line in logs_of(platform, "run-1"))
