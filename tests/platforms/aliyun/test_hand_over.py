"""Runs on Function Compute that outlive their functions, and their client."""

from dataclasses import replace

import pytest

from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import PlatformSpec
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.catalog import open_storage
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.e2e import small
from tests.platforms.aliyun.conftest import OFTEN, sized
from tests.platforms.hand_over import SHORT, assert_handed_over, long_job

pytestmark = pytest.mark.slow


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
