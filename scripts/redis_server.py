"""Start, on this machine, a real Redis or Valkey server with its data in memory only.

``python scripts/redis_server.py install`` installs Debian's package, ``start FOLDER`` starts the server with its
state in FOLDER and prints the environment to use it with, ``stop FOLDER`` ends it.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SERVERS = ("valkey-server", "redis-server")
READY_WITHIN_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["install", "start", "stop"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/redis-server"))
    options = parser.parse_args()
    match options.what:
        case "install":
            install()
        case "start":
            port = start(options.folder.resolve())
            print(f"export FUNCPIPE_TEST_REDIS=redis://127.0.0.1:{port}")
        case "stop":
            stop(options.folder.resolve())


def program() -> str | None:
    """Where the server is installed."""
    return next((found for name in SERVERS if (found := shutil.which(name))), None)


def install() -> None:
    if program():
        return
    subprocess.run(["apt-get", "update", "--quiet"], check=True)
    subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", "redis-server"], check=True)


def start(folder: Path) -> int:
    """Start a server with its state in `folder`; the port at which it answers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = free_port()
    server = launch(folder, "--port", str(port))
    (folder / "server.pid").write_text(str(server.pid))
    await_port(server, port)
    return port


def launch(folder: Path, *settings: str) -> "subprocess.Popen[bytes]":
    """A server process that writes into `folder`, with `settings` as on its command line."""
    found = program()
    if found is None:
        sys.exit("neither valkey-server nor redis-server is installed; run: python scripts/redis_server.py install")
    command = [found, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", *settings]
    with (folder / "server.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def await_port(server: "subprocess.Popen[bytes]", port: int) -> None:
    """Return when `server` answers at `port`."""
    ends_s = time.monotonic() + READY_WITHIN_S
    while not _answers(port):
        if server.poll() is not None or time.monotonic() > ends_s:
            server.kill()
            sys.exit(f"the server did not start: {server.args!r}")
        time.sleep(0.02)


def stop(folder: Path) -> None:
    """End the server whose state is in `folder`, if there is one."""
    file = folder / "server.pid"
    if file.exists():
        process = int(file.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
            while Path(f"/proc/{process}").exists():
                time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


if __name__ == "__main__":
    main()
