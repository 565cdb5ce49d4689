"""S3 servers that tests use: how to reach one, and make buckets there."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cloud_emulation.moto import moto_endpoint
from tests.cloud_emulation.service_models import read_once


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    access_key: str
    secret_key: str

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Have its credentials in the environment, also for the session that boto3 keeps for its own functions."""
        read_once()
        if "boto3" in sys.modules:
            patch.setattr(sys.modules["boto3"], "DEFAULT_SESSION", None)
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
    import boto3

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
    )


def _named_in_the_environment() -> S3Server | None:
    endpoint = os.environ.get("FUNCPIPE_TEST_S3")
    if endpoint is None:
        return None
    return S3Server(endpoint, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])


REAL_SERVER = _named_in_the_environment()
"""The one that `make s3-server` starts; read before any test puts other credentials in the environment."""


@contextmanager
def any_server() -> Iterator[S3Server]:
    """The real one, or else moto's."""
    if REAL_SERVER is not None:
        yield REAL_SERVER
        return
    with moto_endpoint() as endpoint:
        yield S3Server(endpoint, "test", "test")
