"""What is done on real accounts (`make cloud-aws`, `make cloud-aliyun`), done on the emulated ones."""

from pathlib import Path

import pytest

from funcpipe.platforms.aliyun.account import Account as AliyunAccount
from funcpipe.platforms.aws.account import Account as AwsAccount
from funcpipe.platforms.shared.cloud import Polling
from funcpipe.platforms.shared.package import Docker
from tests.cloud import accounts
from tests.cloud.check import Pace, check, most_usd
from tests.cloud_emulation.aliyun import aliyun_cloud
from tests.cloud_emulation.aws import aws_cloud
from tests.cloud_emulation.docker import RegistryDocker
from tests.cloud_emulation.forks import forked
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer
from tests.platforms.aliyun.conftest import serving

BUDGET_USD = 0.50
OFTEN = Polling(every_s=0.2)
PACE = Pace(steps=12, pause_s=0.5, lifetime_s=9.0)  # twelve seconds, longer than a function may live

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.long
def test_the_check_of_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with aws_cloud(tmp_path) as cloud:
        cloud.start = forked
        monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.moto)
        monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", cloud.endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        cloud.environment["AWS_ENDPOINT_URL_LAMBDA"] = cloud.endpoint
        account = AwsAccount(region="us-east-1", endpoint=cloud.endpoint)
        docker = Docker("a-docker-that-is-not-there")
        trial = accounts.on_aws(account, say=print, docker=docker, polling=OFTEN, sleep=lambda s: None)
        said: list[str] = []

        def say(text: str) -> None:
            print(text)
            said.append(text)

        found = check(trial, PACE, max_usd=BUDGET_USD, say=say)
        assert found.failures == ()
        assert found.equal
        assert said[0].startswith("AWS Lambda, account 123456789012, us-east-1: this spends $0.37 at most, of $0.50")
        with pytest.raises(SystemExit, match=r"more than --max-usd 0\.01"):
            check(trial, PACE, max_usd=0.01, say=say)
        assert most_usd(trial) < BUDGET_USD


@pytest.mark.long
def test_the_check_of_alibaba_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)
    with serving(OssServer()) as oss, aliyun_cloud() as cloud:
        cloud.start = forked
        account = AliyunAccount(region=REGION, endpoint=cloud.endpoint)
        docker = RegistryDocker(cloud, tmp_path)
        trial = accounts.on_aliyun(
            account, "registry.test/you/funcpipe", say=print, docker=docker, polling=OFTEN, oss=oss.endpoint
        )
        found = check(trial, PACE, max_usd=BUDGET_USD, say=print)
        assert found.failures == ()
        assert found.equal
        assert most_usd(trial) < BUDGET_USD
