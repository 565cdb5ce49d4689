"""Servers for the storage back-ends: moto's in every run, a real one where the environment names it."""

import functools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

from tests.cloud_emulation.moto import moto_endpoint
from tests.contract.oss_server import OssServer


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    access_key: str
    secret_key: str

    def use(self, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("AWS_ACCESS_KEY_ID", self.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", self.secret_key)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        patch.delenv("AWS_PROFILE", raising=False)

    def make_bucket(self, name: str) -> None:
        """Make the bucket be there; its credentials are in use."""
        client = _client(self.endpoint, self.access_key, self.secret_key)
        if name not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=name)


@functools.cache
def _client(endpoint: str, access_key: str, secret_key: str) -> Any:
    """One for each server: to make one takes longer than most tests."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
    )


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with moto_endpoint() as endpoint:
        yield S3Server(endpoint, "test", "test")


@pytest.fixture(scope="session")
def real_s3_server() -> S3Server:
    """The one that `make s3-server` starts."""
    endpoint = os.environ.get("FUNCPIPE_TEST_S3")
    if endpoint is None:
        pytest.skip("no S3 server: run `make s3-server` and set what it prints")
    return S3Server(endpoint, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])


@pytest.fixture(scope="module")
def oss_server() -> Iterator[OssServer]:
    server = OssServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
