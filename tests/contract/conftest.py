"""Servers for the storage back-ends: moto's in every run, a real one where the environment names it."""

import os
import threading
from collections.abc import Iterator

import pytest

from tests.cloud_emulation.moto import moto_endpoint
from tests.contract.express_proxy import ExpressProxy
from tests.contract.faulty_proxy import answering
from tests.contract.oss_server import OssServer
from tests.redis_servers import redis_server
from tests.s3_servers import REAL_SERVER, S3Server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with moto_endpoint() as endpoint:
        yield S3Server(endpoint, "test", "test")


@pytest.fixture(scope="session")
def real_s3_server() -> S3Server:
    """The one that `make s3-server` starts."""
    if REAL_SERVER is None:
        pytest.skip("no S3 server: run `make s3-server` and set what it prints")
    return REAL_SERVER


@pytest.fixture(scope="session")
def express_proxy(moto_server: S3Server) -> Iterator[ExpressProxy]:
    """A directory bucket, which a bucket of moto's server keeps."""
    with pytest.MonkeyPatch.context() as patch:
        moto_server.use(patch)
        moto_server.make_bucket("funcpipe-express")
    with answering(ExpressProxy(moto_server.endpoint, "funcpipe-express")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def oss_server() -> Iterator[OssServer]:
    server = OssServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def real_redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the one that `make redis-server` starts, or of one for these tests, where it is installed."""
    if (url := os.environ.get("FUNCPIPE_TEST_REDIS")) is not None:
        yield url
        return
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield f"redis://127.0.0.1:{port}"
