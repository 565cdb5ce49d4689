"""How the process of a host begins: it reads what it is told, loads what functions need, and serves."""

import asyncio
import gc
import importlib
import os
import selectors
import shutil
import socket

from funcpipe.core import from_text
from funcpipe.errors import PlatformError
from funcpipe.platforms.local.cgroup import Groups
from funcpipe.platforms.local.host import CLIENT, Host, HostSpec
from funcpipe.platforms.local.limits import ImposedLimits
from funcpipe.platforms.processors import usable_processors


def main(listener: int, folder: str) -> None:
    """Serve on the socket with file descriptor `listener`, which lies in `folder`; the folder is removed at the end.

    The HostSpec comes first on the pipe from the client, and ends with a zero byte.
    """
    try:
        told = from_text(HostSpec, _read_told(), source="what the host of local functions is told")
        for name in (*told.preload, told.entry.partition(":")[0]):
            importlib.import_module(name)
        gc.freeze()  # what is loaded stays, and its pages are shared with functions longer if nobody counts it
        processors = usable_processors()
        limits = ImposedLimits(told.spec, folder, Groups(), processors=processors) if told.imposed else None
        selector = selectors.DefaultSelector()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(Host(told, limits, socket.socket(fileno=listener), selector, folder).serve())
    finally:
        shutil.rmtree(folder)


def _read_told() -> str:
    """What the client says first."""
    data = b""
    while not data.endswith(b"\0"):
        more = os.read(CLIENT, 65536)
        if not more:
            raise PlatformError("the client of this host of local functions has ended before it began")
        data += more
    return data[:-1].decode()
