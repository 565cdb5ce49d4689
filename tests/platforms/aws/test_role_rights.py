"""Runs on AWS that outlive their functions, and their client; and what the roles of functions may do.

The roles have the rights that functions need, by what these have asked for in such runs, and no others.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe import data
from funcpipe.client.control.status import status
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Outcome, RunSettings
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.cloud import SECRET
from funcpipe.platforms.shared.deployment import data_bucket
from tests.cloud_emulation.aws import AwsCloud
from tests.cloud_emulation.lambda_runtime import REGION
from tests.e2e import small
from tests.platforms.aws.conftest import EVERY_S, OFTEN, STORAGE, deploy
from tests.platforms.aws.rights import Cloud, refused, table, unused
from tests.platforms.aws.test_functions import spec
from tests.platforms.hand_over import (
    LATE_S,
    LOOK_S,
    SHORT,
    WATCHED,
    assert_handed_over,
    assert_like_one_process,
    gated_job,
    long_job,
)
from tests.support.data_reads import data_job
from tests.support.shard_files import as_pair, write_mds


def platform_of(account: Account) -> AwsPlatform:
    return AwsPlatform(replace(load_spec("aws-lambda"), cold_start_s=1.0), account, polling=OFTEN)


def prepared(
    job: Job, account: Account, storage: Storage, faults: FaultTolerance, settings: RunSettings | None = None
) -> PreparedRun:
    session = session_on(Site(platform_of(account), storage, STORAGE))
    return prepare(job, session, faults=faults, settings=settings or RunSettings())


def stop_one(cloud: Cloud, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a function that finds the run deleted, or cannot record what it has started: it invokes one, and stops it."""
    function = cloud.cloud.client("lambda").get_function_configuration(FunctionName="funcpipe-1024")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", cloud.role_name(role))
        patch.setenv(SECRET, function["Environment"]["Variables"][SECRET])
        patch.setenv("AWS_ENDPOINT_URL", cloud.objects_url)
        patch.setenv("AWS_ENDPOINT_URL_LAMBDA", cloud.lambda_url)
        platform = AwsPlatform(load_spec("aws-lambda"), Account(region=REGION), deployment="funcpipe", polling=OFTEN)
        worker = spec(open_storage(STORAGE), small.failing_loss)
        failed = platform.invoke(worker)
        while platform.status(failed).reason == "":
            time.sleep(EVERY_S)
        platform.stop(platform.invoke(spec(open_storage(STORAGE), small.sleeping_loss)))


def renew_one(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a function whose run has gone on for a day."""
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", cloud.role_name("FunctionRole"))
        patch.setenv("AWS_ENDPOINT_URL", cloud.objects_url)
        store = open_storage(STORAGE)
        for key in ("run-1/g0000-3fa9/run.json", "_watch/run-1/g0000-3fa9"):
            store.put(key, b"1")
            store.touch(key)
    assert [request.path for proxy in cloud.proxies for request in proxy.seen if request.copied]


def test_functions_hand_over_to_functions_that_they_invoke_and_may_do_nothing_else(
    deployed: Account, storage: Storage, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        seen = Cloud(cloud, stack)
        job = long_job(small.plan(1, 1))
        result = launch(prepared(job, deployed, storage, SHORT))
        assert_handed_over(result, job)
        assert len([call for call in cloud.calls if call.endswith("/invocations")]) >= len(result.workers)
        assert max(cloud.chains) >= 2  # functions pass on what Lambda counts the invocations of a chain by
        assert storage.list("") == ()
        stop_one(seen, "FunctionRole", monkeypatch)
        renew_one(seen, monkeypatch)
        needed, policy = seen.needed("FunctionRole"), seen.policy("FunctionRole")
        storage.delete_many(storage.list(""))
    print("functions:", *table(policy, needed), sep="\n")
    assert refused(policy, needed) == set()
    assert unused(policy, needed) == set()


def test_a_run_without_its_client_outlives_its_only_function_by_a_watchdog_that_may_do_nothing_else(
    deployed: Account, storage: Storage, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(small.GATES, str(tmp_path))
    cloud.environment[small.GATES] = str(tmp_path)
    job = gated_job(small.plan(1, 1))
    with ExitStack() as stack:
        seen = Cloud(cloud, stack)
        launch_detached(prepared(job, deployed, storage, WATCHED, RunSettings(name="left")))
        while not [worker for worker in status(storage, "left").workers if worker.step > 2]:
            time.sleep(LOOK_S)
        (worker,) = [environment for environment in cloud.environments if environment.busy]
        worker.close()
        small.open_gates(1)
        time.sleep(LATE_S)
        assert len(cloud.pass_a_minute("funcpipe")) == 1
        while [worker for worker in status(storage, "left").workers if worker.outcome is not Outcome.FINISHED]:
            time.sleep(LOOK_S)
        while storage.list("_watch/"):  # a minute that passes while the last heartbeat is young leaves the mark there
            time.sleep(LATE_S)
            cloud.pass_a_minute("funcpipe")
        assert [worker.attempt for worker in status(storage, "left").workers] == [1]
        assert_like_one_process(launch(prepared(job, deployed, storage, WATCHED, RunSettings(resume="left"))), job)
        assert storage.list("") == ()
        stop_one(seen, "WatchdogRole", monkeypatch)
        needed, policy = seen.needed("WatchdogRole"), seen.policy("WatchdogRole")
        storage.delete_many(storage.list(""))
    print("watchdog:", *table(policy, needed), sep="\n")
    assert refused(policy, needed) == set()
    assert unused(policy, needed) == set()


def test_functions_may_read_the_bucket_of_data_that_a_deployment_names_and_no_other(
    cloud: AwsCloud, account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = data_bucket("datasets/digits")
    deploy(cloud, account, monkeypatch, data=(bucket,))
    cloud.client("s3").create_bucket(Bucket="datasets")
    shards = tmp_path / "digits"
    shards.mkdir()
    write_mds(shards, 32, 8)
    for file in shards.iterdir():
        cloud.client("s3").put_object(Bucket="datasets", Key=f"digits/{file.name}", Body=file.read_bytes())
    _, job = data_job(data.mds("s3://datasets/digits", transform=as_pair), replicas=1, micro_batch=4)
    storage = open_storage(STORAGE)
    with ExitStack() as stack:
        seen = Cloud(cloud, stack)
        assert launch(prepared(job, account, storage, FaultTolerance())).losses
        needed, policy = seen.needed("FunctionRole"), seen.policy("FunctionRole")
    storage.delete_many(storage.list(""))
    print("functions:", *table(policy, needed), sep="\n")
    of_data = {right for right in needed if "arn:aws:s3:::datasets" in right[1]}
    assert {action for action, _ in of_data} == {"s3:GetObject"}
    assert refused(policy, needed) == set()
    elsewhere = {(action, place.replace("/digits/", "/letters/")) for action, place in of_data}
    assert refused(policy, elsewhere) == elsewhere
    written = {("s3:PutObject", place) for _, place in of_data}
    assert refused(policy, written) == written
