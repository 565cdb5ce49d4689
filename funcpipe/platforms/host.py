"""The host of local functions: a process that forks them, in a fraction of a second, and knows how they fare.

It has loaded what functions need, and is asked through a Unix socket by its client and by functions: each request and
each answer is a JSON object behind its length. It ends when its client has ended, and all functions with it; if the
client has said `detach`, when the last function has ended.
"""

import asyncio
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from funcpipe.core import PlatformSpec, from_text
from funcpipe.core.json_form import to_plain
from funcpipe.errors import PlatformError
from funcpipe.platforms.base import Handle, State, Status
from funcpipe.platforms.function import fork, kill, status_of

LENGTH = struct.Struct("!i")
"""What stands before each request and answer."""

CLIENT = 0
"""The file descriptor of the pipe whose other end is the client's: it tells when the client ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What a host is told: the `MODULE:FUNCTION` that functions call with their payload; modules to load before."""

    FORMAT: ClassVar[str] = "funcpipe.host/1"

    entry: str
    preload: tuple[str, ...]
    spec: PlatformSpec


@dataclass
class _Function:
    """A function that was started; `status` is set when it has ended."""

    pid: int
    status: Status = field(default_factory=lambda: Status(state=State.RUNNING))
    stopped: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Host:
    """The functions of one client, and who asks for them."""

    def __init__(self, told: HostSpec, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self._told = told
        self._listener = listener
        self._selector = selector
        self._entry = _load(told.entry)
        self._functions: dict[str, _Function] = {}
        self._functions_end, self._own_end = os.pipe()
        self._client_runs, self._detached = True, False
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Answer requests until nobody needs this host any more; no function runs afterwards."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_reader(CLIENT, self._client_ended)
        server = await asyncio.start_unix_server(self._converse, sock=self._listener)
        await self._over.wait()
        server.close()
        for function in self._functions.values():
            await self._stop(function)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests, in order, until it is closed or this host ends."""
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer = await self._answer(json.loads(await reader.readexactly(length)))
                writer.write(framed(json.dumps(answer)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request:
                case {"verb": "describe"}:
                    return {"spec": to_plain(self._told.spec)}
                case {"verb": "invoke", "worker": worker, "payload": payload}:
                    return {"handle": to_plain(self._invoke(worker, payload))}
                case {"verb": "status", "name": name}:
                    return {"status": to_plain(self._function(name).status)}
                case {"verb": "stop", "name": name}:
                    await self._stop(self._function(name))
                    return {}
                case {"verb": "detach"}:
                    self._detached = True
                    return {}
                case _:
                    raise PlatformError(f"the host of local functions does not understand {request.get('verb')!r}")
        except PlatformError as error:
            return {"error": str(error)}

    def _invoke(self, worker: str, payload: str) -> Handle:
        pid = fork(lambda: self._become(payload), lifeline=self._functions_end)
        handle = Handle(worker=worker, name=f"function {len(self._functions) + 1}, process {pid}")
        self._functions[handle.name] = _Function(pid)
        return handle

    def _become(self, payload: str) -> None:
        """Turn this process, just forked, into a function."""
        os.close(self._own_end)
        for key in list(self._selector.get_map().values()):
            if key.fd != CLIENT:
                os.close(key.fd)
        self._selector.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), CLIENT)
        self._entry(payload)

    def _function(self, name: str) -> _Function:
        if name not in self._functions:
            raise PlatformError(f"the host of local functions never started {name!r}")
        return self._functions[name]

    async def _stop(self, function: _Function) -> None:
        if not function.ended.is_set():
            function.stopped = True
            kill(function.pid)
            await function.ended.wait()

    def _reap(self) -> None:
        """Note which functions have ended; what they started ends with them."""
        for function in self._functions.values():
            if function.ended.is_set():
                continue
            if os.waitid(os.P_PID, function.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                kill(function.pid)
                _, exit_status = os.waitpid(function.pid, 0)
                stopped = Status(state=State.FAILED, reason="stopped")
                function.status = stopped if function.stopped else status_of(exit_status)
                function.ended.set()
        self._end_if_alone()

    def _client_ended(self) -> None:
        if not os.read(CLIENT, 1):
            asyncio.get_running_loop().remove_reader(CLIENT)
            self._client_runs = False
            self._end_if_alone()

    def _end_if_alone(self) -> None:
        needed = self._detached and not all(function.ended.is_set() for function in self._functions.values())
        if not self._client_runs and not needed:
            self._over.set()


def _load(entry: str) -> Callable[[str], None]:
    module, _, name = entry.partition(":")
    function: Callable[[str], None] = getattr(importlib.import_module(module), name)
    return function


def framed(text: str) -> bytes:
    """A request or an answer as it travels."""
    data = text.encode()
    return LENGTH.pack(len(data)) + data


def main(listener: int, folder: str) -> None:
    """Serve on the socket with file descriptor `listener`, which lies in `folder`; the folder is removed at the end.

    The HostSpec comes first on the pipe from the client.
    """
    try:
        (length,) = LENGTH.unpack(_read(LENGTH.size))
        told = from_text(HostSpec, _read(length), source="what the host of local functions is told")
        for name in told.preload:
            importlib.import_module(name)
        gc.freeze()  # what is loaded stays, and its pages are shared with functions longer if nobody counts it
        selector = selectors.DefaultSelector()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(Host(told, socket.socket(fileno=listener), selector).serve())
    finally:
        shutil.rmtree(folder)


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(CLIENT, size - len(data))
        if not more:
            raise PlatformError("the client of this host of local functions has ended before it began")
        data += more
    return data
