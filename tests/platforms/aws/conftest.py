from collections.abc import Iterator
from pathlib import Path

import pytest

from funcpipe.platforms.aws.account import Account
from tests.cloud_emulation.aws import AwsCloud, aws_cloud
from tests.cloud_emulation.lambda_runtime import REGION
from tests.cloud_emulation.moto import moto_endpoint


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
        yield cloud


@pytest.fixture
def account(cloud: AwsCloud) -> Account:
    return Account(region=REGION, endpoint=cloud.endpoint)


def reset(url: str) -> None:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")) as answer:
        answer.read()
