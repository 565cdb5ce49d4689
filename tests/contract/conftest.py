"""Servers for the storage back-ends: moto's in every run, a real one where the environment names it."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

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


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield S3Server(f"http://127.0.0.1:{port}", "test", "test")
    finally:
        process.terminate()
        process.wait()


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
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("moto's server did not start")
