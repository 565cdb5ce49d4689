"""Template processes: each has loaded the code and tensors of one stage, and forks functions of that stage.

    client ── server ── host ┬─ template (torch, our modules, the stage's code and tensors) ─┐
                             ├─ function   <── forked by the template, and left to the host ─┘
                             └─ function   <── forked by the host itself

A function shares pages with its template until one of them writes there (copy on write). A template has one thread, as
a fork has no other, and no connections. It forks a process that forks the function and ends, so that the function
becomes the host's own, as Linux gives those whose parent has ended to the nearest ancestor that wants them: prctl(2),
PR_SET_CHILD_SUBREAPER.
"""

import ctypes
import gc
import json
import logging
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from funcpipe.platforms.local.function import TEMPLATE, as_function, end_after, kill, name_process

_log = logging.getLogger(__name__)

_CHILD_SUBREAPER = 36
_ANSWER = struct.Struct("q")
_ANSWER_S = 5.0
_READY = b"r"
_PIPES = 3  # standard output and error of a function, and where it says that it is ready
_SHARE_OF_MEMORY = 8
"""A template that takes more than this part of the memory that is free ends."""

Request = dict[str, Any]


def adopt_orphans() -> bool:
    """Become the parent of processes below this one whose parent has ended; returns False where that cannot be."""
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class Template:
    """The host's side of a template process, which loads in the background; `fork` may be called once it `is_ready`."""

    def __init__(
        self,
        enter: Callable[[], object],
        load: Callable[[], object],
        work: Callable[[Request, Sequence[int], object], None],
        *,
        lifeline: int,
    ) -> None:
        """In the new process, `enter` leaves what is the host's, and `load` returns what functions find loaded.

        In each function, `work` gets the request, the pipes that came with it, and that. All of them end when all
        others that hold the pipe `lifeline` have ended.
        """
        self.is_ready = False
        self.connection, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            end_after(lambda: _serve(self.connection, theirs, enter, load, work, lifeline))
        theirs.close()
        self.connection.settimeout(_ANSWER_S)
        with suppress(PermissionError, ProcessLookupError):  # the new process does it too: whichever is first
            os.setpgid(self.pid, self.pid)

    def heard(self) -> bool:
        """Read what the process says once it has loaded; returns False if it has ended instead."""
        self.is_ready = self.connection.recv(1) == _READY
        return self.is_ready

    def fork(self, request: Request, pipes: Sequence[int]) -> int:
        """Return the number of a new function. Raises OSError where there is none."""
        data = json.dumps(request).encode()
        socket.send_fds(self.connection, [_ANSWER.pack(len(data))], pipes)
        self.connection.sendall(data)
        answer = self.connection.recv(_ANSWER.size)
        if len(answer) != _ANSWER.size:
            raise ConnectionError("the template has ended")
        (pid,) = _ANSWER.unpack(answer)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return int(pid)

    def end(self) -> None:
        """End the process; functions that it has forked run on."""
        self.is_ready = False
        self.connection.close()
        kill(self.pid)


def _serve(
    hosts: socket.socket,
    own: socket.socket,
    enter: Callable[[], object],
    load: Callable[[], object],
    work: Callable[[Request, Sequence[int], object], None],
    lifeline: int,
) -> None:
    """Be a template: load, and fork functions until the host has ended, or does not want it any more."""
    os.setpgid(0, 0)
    name_process(TEMPLATE)
    hosts.close()
    _ = enter()
    before_pages = _resident_pages()
    try:
        loaded = load()
    except Exception as error:  # noqa: BLE001 - the function says what is wrong, which loads the same
        _log.info("there is no template: %s", error)
        return
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        _log.info("there is no template, as loading the stage has started threads, which a fork does not have")
        return
    if (_resident_pages() - before_pages) * _SHARE_OF_MEMORY > os.sysconf("SC_AVPHYS_PAGES"):
        _log.info("there is no template: it would take too much of the memory that is free")
        return
    own.sendall(_READY)
    watched: list[Any] = [own, lifeline]
    while lifeline not in select.select(watched, [], [])[0]:
        head, pipes, _, _ = socket.recv_fds(own, _ANSWER.size, _PIPES)
        if not head:
            return
        (length,) = _ANSWER.unpack(head)
        request = json.loads(_received(own, length))

        def function(request: Request = request, pipes: Sequence[int] = pipes) -> None:
            own.close()
            work(request, pipes, loaded)

        own.sendall(_ANSWER.pack(_fork_orphan(lambda: as_function(function, lifeline))))
        for pipe in pipes:
            os.close(pipe)


def _fork_orphan(work: Callable[[], None]) -> int:
    """Return the number of a process that does `work`, and whose parent has ended."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            end_after(work)
        os.write(writing, _ANSWER.pack(pid))
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)
    answer = os.read(reading, _ANSWER.size)
    os.close(reading)
    return int(_ANSWER.unpack(answer)[0])


def _received(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the host has ended")
        data += more
    return bytes(data)


def _resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
