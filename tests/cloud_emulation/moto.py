"""moto's server as a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

READY_WITHIN_S = 60

_SERVER = """
import sys, threading
from moto.s3.responses import S3Response
from moto.server import main

lock, put = threading.Lock(), S3Response.put_object

def put_one_at_a_time(*args, **kwargs):
    with lock:
        return put(*args, **kwargs)

S3Response.put_object = put_one_at_a_time
main(sys.argv[1:])
"""
"""moto's server, whose conditional puts are atomic: by itself it looks for the object and stores it in two steps."""


@contextmanager
def moto_endpoint() -> Iterator[str]:
    """The URL of a server that lasts as long as the context."""
    port = free_port()
    command = [sys.executable, "-c", _SERVER, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    ends_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < ends_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("moto's server did not start")
