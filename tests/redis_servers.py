"""Real Redis or Valkey servers that tests start for themselves, each with its own settings."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.redis_server import await_port, free_port, launch, program


@contextmanager
def redis_server(folder: Path, *settings: str, port_setting: str = "--port") -> Iterator[int]:
    """A server with `settings` as on its command line, and the port at which it answers; skips where there is none."""
    if program() is None:
        pytest.skip("neither redis-server nor valkey-server is installed: run `make redis-server`")
    port = free_port()
    server = launch(folder, *settings, port_setting, str(port))
    try:
        await_port(server, port)
        yield port
    finally:
        end(server)


def end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    server.wait()
