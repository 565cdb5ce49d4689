"""The process that `forks` starts: it loads what functions load, and forks whenever it is told to.

It is run without the packages of the tests, so that its forks have none of them.
"""

import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from typing import Any

_LOADED = (
    "torch",
    "numpy",
    "cloudpickle",
    "xxhash",
    "safetensors.torch",
    "cryptography.hazmat.primitives.ciphers.aead",
    "boto3",
    "oss2",
    "alibabacloud_fc20230330.client",
)
_LARGEST = 65_536
_PR_SET_PDEATHSIG = 1


def read_once() -> None:
    """Read boto3's descriptions of services here, and not in each fork: that is most of what a client of AWS takes."""
    import boto3
    from botocore import loaders, session

    session.create_loader = functools.cache(loaders.create_loader)
    for name in ("s3", "lambda", "logs"):
        boto3.session.Session().client(name, region_name="us-east-1", aws_access_key_id="-", aws_secret_access_key="-")


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each message; in a fork returns what it is to do, in the server None once nobody asks any more."""
    server, numbers = os.getpid(), dict[int, int]()
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel.fileno(), wakes], [], [])
        if wakes in ready:
            os.read(wakes, 512)
            for process, code in _ended():
                channel.send(json.dumps({"number": numbers.pop(process), "code": code}).encode())
        if channel.fileno() in ready:
            message, files, _, _ = socket.recv_fds(channel, _LARGEST, 1)
            if not message:
                return None
            told: dict[str, Any] = json.loads(message)
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for file in (wakes, woken):
                    os.close(file)
                _become(told, files[0], server)
                channel.send(json.dumps({"number": told["number"], "process": os.getpid()}).encode())
                channel.close()
                return told
            os.close(files[0])
            numbers[process] = told["number"]


def _ended() -> list[tuple[int, int]]:
    """The forks that have ended, with their exit codes."""
    found = list[tuple[int, int]]()
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not process:
            return found
        found.append((process, os.waitstatus_to_exitcode(status)))


def _become(told: dict[str, Any], output: int, server: int) -> None:
    """Be what a new process would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    os.setsid()
    if told["group"] is not None:
        with open(told["group"], "w") as members:
            members.write(str(os.getpid()))
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.clear()
    os.environ.update(told["environment"])
    time.tzset()
    os.chdir(told["folder"])
    sys.path[:] = told["path"] + [path for path in sys.path if path not in told["path"]]


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    for name in _LOADED:
        importlib.import_module(name)
    read_once()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one of its parent's threads only"
    gc.collect()
    gc.freeze()  # so that what was loaded stays shared
    work = serve(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        module = work["words"][0]
        sys.argv = work["words"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
