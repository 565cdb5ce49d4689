from collections.abc import Iterator
from pathlib import Path

import pytest

from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.deployment import Deployer
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.image import lambda_package
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.data_buckets import DataBucket
from funcpipe.platforms.shared.docker import Docker
from funcpipe.platforms.shared.polling import Polling
from tests.cloud_emulation.aws import AwsCloud, aws_cloud
from tests.cloud_emulation.forks import forked
from tests.cloud_emulation.lambda_runtime import REGION
from tests.cloud_emulation.moto import moto_endpoint

STORAGE = "s3://funcpipe-123456789012-us-east-1/runs"
PLATFORM = "aws-lambda://funcpipe?region=us-east-1"
EVERY_S = 0.2
OFTEN = Polling(every_s=EVERY_S)


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with moto_endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def cloud(moto_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsCloud]:
    """An empty account."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with aws_cloud(tmp_path / "images", moto_url) as cloud:
        reset(moto_url)
        cloud.start = forked
        yield cloud


@pytest.fixture
def account(cloud: AwsCloud) -> Account:
    return Account(region=REGION, endpoint=cloud.endpoint)


def deploy(
    cloud: AwsCloud, account: Account, monkeypatch: pytest.MonkeyPatch, *, data: tuple[DataBucket, ...] = ()
) -> None:
    """Make functions of 1024 MB in the account, which may read `data`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.moto)  # for the storage, whose URL is the same in functions
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", cloud.endpoint)
    cloud.environment["AWS_ENDPOINT_URL_LAMBDA"] = cloud.endpoint
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    shape = Shape(name="funcpipe", memory_mb=(1024,), data=data)
    Deployer(account, sleep=lambda s: None, docker=Docker("a-docker-that-is-not-there")).deploy(shape, lambda_package())


@pytest.fixture
def deployed(cloud: AwsCloud, account: Account, monkeypatch: pytest.MonkeyPatch) -> Account:
    deploy(cloud, account, monkeypatch)
    return account


@pytest.fixture
def platform(deployed: Account) -> AwsPlatform:
    return AwsPlatform(load_spec("aws-lambda"), deployed, polling=OFTEN)


@pytest.fixture
def storage(deployed: Account) -> Iterator[Storage]:
    store = open_storage(STORAGE)
    yield store
    assert store.list("") == ()


def reset(url: str) -> None:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")) as answer:
        answer.read()
