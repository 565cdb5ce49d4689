"""Servers for the storage back-ends: moto's in every run, a real one where the environment names it."""

import threading
from collections.abc import Iterator

import pytest

from tests.cloud_emulation.moto import moto_endpoint
from tests.contract.oss_server import OssServer
from tests.s3_servers import S3Server, real_server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with moto_endpoint() as endpoint:
        yield S3Server(endpoint, "test", "test")


@pytest.fixture(scope="session")
def real_s3_server() -> S3Server:
    """The one that `make s3-server` starts."""
    server = real_server()
    if server is None:
        pytest.skip("no S3 server: run `make s3-server` and set what it prints")
    return server


@pytest.fixture(scope="module")
def oss_server() -> Iterator[OssServer]:
    server = OssServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
