"""Functions' processes that are forks of one which has torch and the clouds' libraries loaded: that takes seconds.

What runs in a fork is what `in_clean_folder` runs: the image's command, with the image's files and installed packages
and nothing else, and the environment that the cloud adds to a clean one. But what a fork shares with its parent is
there before the command begins, and no memory group counts it; tests about either use `in_clean_folder`.
"""

import atexit
import itertools
import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.cloud_emulation.processes import Enter, clean_environment

_SERVER = Path(__file__).with_name("fork_server.py")
_LARGEST = 65_536


class Fork:
    """A process of a function, as far as clouds use `subprocess.Popen`."""

    def __init__(self, output: IO[str]) -> None:
        self.pid = 0
        self.stdout = output
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.code = 0

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.code if self.ended.is_set() else None

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self.ended.wait()
        return self.code


class ForkServer:
    """The process whose forks functions are; it is started when the first is asked for, and ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._forks: dict[int, Fork] = {}
        self._socket: socket.socket | None = None

    def __call__(self, command: Sequence[str], image: Path, variables: Mapping[str, str], enter: Enter) -> Fork:
        """See `processes.Start`."""
        python, option, *words = command
        assert (python, option) == ("python", "-m")
        reads, writes = os.pipe()
        fork = Fork(os.fdopen(reads))
        with self._lock:
            channel = self._socket = self._socket or self._begin()
            number = next(self._numbers)
            self._forks[number] = fork
        told = {
            "number": number,
            "words": words,
            "folder": str(image),
            "path": [str(image), str(image), site.getsitepackages()[0]],
            "environment": {**clean_environment(str(image)), **variables},
            "group": enter.members and str(enter.members),
        }
        socket.send_fds(channel, [json.dumps(told).encode()], [writes])
        os.close(writes)
        fork.begun.wait()
        if not fork.pid:
            raise RuntimeError("the server of forks has ended")
        return fork

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-S", str(_SERVER), str(theirs.fileno())],
                cwd="/",
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(ours,), daemon=True).start()
        atexit.register(_end, ours, process)
        return ours

    def _listen(self, channel: socket.socket) -> None:
        """Note what the server says of its forks; they end with it."""
        while said := channel.recv(_LARGEST):
            word: dict[str, Any] = json.loads(said)
            fork = self._forks[word["number"]]
            if "process" in word:
                fork.pid = word["process"]
                fork.begun.set()
            else:
                fork.code = word["code"]
                fork.ended.set()
                fork.begun.set()
                del self._forks[word["number"]]
        for fork in self._forks.values():
            fork.code = -signal.SIGKILL
            fork.ended.set()
            fork.begun.set()


def _end(channel: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    channel.shutdown(socket.SHUT_RDWR)
    process.wait()


forked = ForkServer()
"""What clouds of tests start functions with."""
