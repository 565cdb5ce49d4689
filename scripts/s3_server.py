"""Start, on this machine, a small S3 server that is nobody's emulator: Ceph's RADOS gateway with its data in memory.

``python scripts/s3_server.py install`` installs Debian's packages, ``start FOLDER`` starts the server with its state in
FOLDER and prints the environment to use it with, ``stop FOLDER`` ends it.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
ACCESS_KEY, SECRET_KEY = "funcpipe-test", "only-for-tests-on-this-machine"
READY_WITHIN_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["install", "start", "stop"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("out/s3-server"))
    parser.add_argument("--port", type=int, default=7480)
    options = parser.parse_args()
    match options.what:
        case "install":
            install()
        case "start":
            start(options.folder.resolve(), options.port)
        case "stop":
            stop(options.folder.resolve())


def install() -> None:
    if shutil.which("radosgw") and shutil.which("ceph-osd") and shutil.which("ceph-mon"):
        return
    subprocess.run(["apt-get", "update", "--quiet"], check=True)
    subprocess.run(["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES], check=True)


def start(folder: Path, port: int) -> None:
    if _answers(port):
        sys.exit(f"something answers on port {port} already")
    if shutil.which("radosgw") is None:
        sys.exit("radosgw is not installed; run: python scripts/s3_server.py install")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    monitor_port = _free_port()
    _write_configuration(folder, port, monitor_port)
    _start_monitor(folder, monitor_port)
    _start_store(folder)
    _start_gateway(folder, port)
    print(f"export AWS_ACCESS_KEY_ID={ACCESS_KEY}")
    print(f"export AWS_SECRET_ACCESS_KEY={SECRET_KEY}")
    print(f"export FUNCPIPE_TEST_S3=http://127.0.0.1:{port}")


def stop(folder: Path) -> None:
    for file in sorted(folder.glob("*.pid")):
        process = int(file.read_text())
        try:
            os.kill(process, signal.SIGTERM)
        except ProcessLookupError:
            continue
        while Path(f"/proc/{process}").exists():
            time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _write_configuration(folder: Path, port: int, monitor_port: int) -> None:
    (folder / "ceph.conf").write_text(
        f"""[global]
fsid = {uuid.uuid4()}
mon host = [v2:127.0.0.1:{monitor_port}/0]
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
ms client mode = crc
ms service mode = crc
ms cluster mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
run dir = {folder}
admin socket = {folder}/$cluster-$name.asok
log file = {folder}/$name.log
pid file = {folder}/$name.pid
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/gateway
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 64
mon initial members = a
mon data avail crit = 1
mon data avail warn = 1
"""
    )


def _start_monitor(folder: Path, port: int) -> None:
    fsid = next(
        line.split(" = ")[1] for line in (folder / "ceph.conf").read_text().splitlines() if line.startswith("fsid")
    )
    members = str(folder / "monmap")
    _run(folder, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{port}/0]", members)
    _run(folder, "ceph-mon", "--mkfs", "--id", "a", "--monmap", members)
    _run(folder, "ceph-mon", "--id", "a")


def _start_store(folder: Path) -> None:
    (folder / "osd").mkdir()
    number = str(uuid.uuid4())
    _run(folder, "ceph", "osd", "new", number)
    _run(folder, "ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", number)
    _run(folder, "ceph-osd", "--id", "0")


def _start_gateway(folder: Path, port: int) -> None:
    (folder / "gateway").mkdir()
    user = ("user", "create", "--uid=funcpipe", "--display-name=funcpipe")
    _run(folder, "radosgw-admin", *user, f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
    _run(folder, "radosgw", "--name", "client.gateway")
    ends_s = time.monotonic() + READY_WITHIN_S
    while not _answers(port):
        if time.monotonic() > ends_s:
            sys.exit(f"the server did not answer within {READY_WITHIN_S} s; see {folder}")
        time.sleep(0.2)


def _run(folder: Path, program: str, *arguments: str) -> None:
    command = [program, "--conf", str(folder / "ceph.conf"), *arguments]
    if program == "monmaptool":
        command = [program, *arguments]
    output = folder / "start.log"
    with output.open("a") as log:  # a file: daemons keep it open
        done = subprocess.run(command, stdout=log, stderr=log, timeout=READY_WITHIN_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{output.read_text()}")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
