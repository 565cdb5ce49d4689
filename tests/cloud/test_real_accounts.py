"""`make cloud-aws` and `make cloud-aliyun` as tests: only where FUNCPIPE_CLOUD_TESTS=1 says so, as they spend money.

Credentials and region are those of `funcpipe deploy`, what may be spent is FUNCPIPE_CLOUD_BUDGET_USD. Alibaba Cloud
also needs FUNCPIPE_TEST_REPOSITORY, and a docker that is logged in there.
"""

import os

import pytest

from funcpipe.platforms.aliyun.account import Account as AliyunAccount
from funcpipe.platforms.aws.account import Account as AwsAccount
from tests.cloud import accounts
from tests.cloud.check import CloudUnderTest, Pace, check

PACE = Pace(steps=100, pause_s=0.75, lifetime_s=100.0)

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("FUNCPIPE_CLOUD_TESTS") != "1", reason="FUNCPIPE_CLOUD_TESTS=1 spends money"),
]


def test_aws_does_what_it_must() -> None:
    assert_it_works(accounts.on_aws(AwsAccount(), say=print))


def test_alibaba_cloud_does_what_it_must() -> None:
    repository = os.environ.get("FUNCPIPE_TEST_REPOSITORY")
    if repository is None:
        pytest.skip("FUNCPIPE_TEST_REPOSITORY names no repository for the image")
    assert_it_works(accounts.on_aliyun(AliyunAccount(), repository, say=print))


def assert_it_works(cloud: CloudUnderTest) -> None:
    budget_usd = float(os.environ.get("FUNCPIPE_CLOUD_BUDGET_USD", "0.5"))
    assert check(cloud, PACE, max_usd=budget_usd, say=print).failures == ()
