import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.deployment import Deployer, lambda_package
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.resources import log_group
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.cloud import Polling
from funcpipe.platforms.shared.deployment import DataBucket
from funcpipe.platforms.shared.package import Docker
from tests.cloud_emulation.aws import AwsCloud, aws_cloud
from tests.cloud_emulation.forks import forked
from tests.cloud_emulation.lambda_runtime import REGION
from tests.cloud_emulation.moto import moto_endpoint

BUCKET = "funcpipe-123456789012-us-east-1"
STORAGE = f"s3://{BUCKET}/runs"
PLATFORM = "aws-lambda://funcpipe?region=us-east-1"
EVERY_S = 0.2
OFTEN = Polling(every_s=EVERY_S)


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with moto_endpoint() as endpoint:
        yield endpoint


@dataclass(kw_only=True)
class Standing:
    """The account of all tests, and who asks it; `kept` are the objects of the deployment there, if there is one.

    To deploy takes longer than most tests: the next one finds the deployment as it was, unless a test has changed it.
    """

    cloud: AwsCloud
    account: Account
    kept: frozenset[str] | None = None

    def clear(self) -> None:
        """Have nothing in the account."""
        reset(self.cloud.moto)
        shutil.rmtree(self.cloud.folder, ignore_errors=True)
        self.account = Account(region=REGION, endpoint=self.cloud.endpoint)
        self.kept = None

    def deploy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have functions of 1024 MB in the account, which have not run yet."""
        if self.kept is None:
            self.clear()
            deploy(self.cloud, self.account, monkeypatch)
            self.kept = frozenset(keys_in(self.cloud, BUCKET))
            return
        tell(self.cloud, monkeypatch)
        for key in set(keys_in(self.cloud, BUCKET)) - self.kept:
            self.cloud.client("s3").delete_object(Bucket=BUCKET, Key=key)
        logs = self.cloud.client("logs")
        for stream in logs.describe_log_streams(logGroupName=log_group("funcpipe"))["logStreams"]:
            logs.delete_log_stream(logGroupName=log_group("funcpipe"), logStreamName=stream["logStreamName"])


@pytest.fixture(scope="session")
def standing(moto_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with aws_cloud(tmp_path_factory.mktemp("aws") / "images", moto_url) as cloud:
        cloud.start = forked
        yield Standing(cloud=cloud, account=Account(region=REGION, endpoint=cloud.endpoint))


@pytest.fixture
def cloud(standing: Standing, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsCloud]:
    """An account: empty, unless the test asks for what is deployed."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    if "deployed" in request.fixturenames:
        standing.deploy(monkeypatch)
    else:
        standing.clear()
    yield standing.cloud
    standing.cloud.forget()
    standing.cloud.start = forked


@pytest.fixture
def account(cloud: AwsCloud, standing: Standing) -> Account:
    return standing.account


@pytest.fixture
def changed(cloud: AwsCloud, standing: Standing) -> Iterator[None]:
    """For a test that changes what is deployed: the next one finds it new."""
    yield
    standing.kept = None


def deploy(
    cloud: AwsCloud, account: Account, monkeypatch: pytest.MonkeyPatch, *, data: tuple[DataBucket, ...] = ()
) -> None:
    """Make functions of 1024 MB in the account, which may read `data`."""
    tell(cloud, monkeypatch)
    shape = Shape(name="funcpipe", memory_mb=(1024,), data=data)
    Deployer(account, sleep=lambda s: None, docker=Docker("a-docker-that-is-not-there")).deploy(shape, lambda_package())


def tell(cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell this process and functions where the account answers."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.moto)  # for the storage, whose URL is the same in functions
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", cloud.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_APPLICATION_AUTO_SCALING", cloud.endpoint)
    cloud.environment["AWS_ENDPOINT_URL_LAMBDA"] = cloud.endpoint
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def keys_in(cloud: AwsCloud, bucket: str) -> list[str]:
    return [item["Key"] for item in cloud.client("s3").list_objects_v2(Bucket=bucket).get("Contents", ())]


@pytest.fixture
def deployed(cloud: AwsCloud, account: Account) -> Account:
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
