"""Runs on Function Compute that outlive their functions, and their client."""

import time
from dataclasses import replace

from funcpipe.client.control import status
from funcpipe.client.launch import launch, launch_detached
from funcpipe.client.prepare import PreparedRun, prepare
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, Outcome, PlatformSpec, RunSettings
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.catalog import open_storage
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.e2e import small
from tests.platforms.aliyun.conftest import EVERY_S, OFTEN, sized
from tests.platforms.hand_over import SHORT, assert_handed_over, long_job


def test_functions_hand_over_to_functions_that_they_invoke(
    deployed: Account, spec: PlatformSpec, url: str, cloud: AliyunCloud
) -> None:
    job = replace(long_job(sized(small.plan(1, 1))), prices=spec)
    platform = AliyunPlatform(replace(spec, cold_start_s=1.0), deployed, polling=OFTEN)
    storage = open_storage(url)
    result = launch(prepare(job, session_on(Site(platform, storage, url)), faults=SHORT))
    assert_handed_over(result, job)
    assert len(cloud.tasks) >= len(result.workers)
    assert storage.list("") == ()


def test_a_run_without_its_client_outlives_the_death_of_its_only_function(
    deployed: Account, spec: PlatformSpec, url: str, cloud: AliyunCloud
) -> None:
    job = replace(long_job(sized(small.plan(1, 1))), prices=spec)
    faults = FaultTolerance(heartbeat_s=0.5, lease_s=1.0, checkpoint_steps=1)
    platform = AliyunPlatform(replace(spec, cold_start_s=1.0), deployed, polling=OFTEN)
    storage = open_storage(url)
    cloud.environment |= {"ALIBABA_CLOUD_REGION": "cn-test"}

    def prepared(settings: RunSettings) -> PreparedRun:
        return prepare(job, session_on(Site(platform, storage, url)), faults=faults, settings=settings)

    launch_detached(prepared(RunSettings(name="left")))
    while not [worker for worker in status(storage, "left").workers if worker.step > 2]:
        time.sleep(EVERY_S)
    for instance in cloud.instances.values():
        instance.kill()
    time.sleep(3 * faults.heartbeat_s)  # until the watchdog sees that the heartbeat is late
    ((_, event),) = cloud.pass_a_minute()
    while [worker for worker in status(storage, "left").workers if worker.outcome is not Outcome.FINISHED]:
        time.sleep(EVERY_S)
    assert cloud.tasks["funcpipe-watchdog", event]["status"] == "Succeeded"
    assert cloud.instances["funcpipe-watchdog", event].paths == ["/invoke"]
    assert [worker.attempt for worker in status(storage, "left").workers] == [1]
    launch(prepared(RunSettings(resume="left")))
    assert storage.list("") == ()
