"""The start of a host's process: it reads its instructions, loads what functions need, and serves."""

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
        spec = from_text(HostSpec, _read_spec(), source="the spec of the host of local functions")
        for name in (*spec.preload, spec.entry.partition(":")[0]):
            importlib.import_module(name)
        gc.freeze()  # loaded modules stay, and their pages are shared with functions longer if they are not counted
        processors = usable_processors()
        limits = ImposedLimits(spec.spec, folder, Groups(), processors=processors) if spec.imposed else None
        selector = selectors.DefaultSelector()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(Host(spec, limits, socket.socket(fileno=listener), selector, folder).serve())
    finally:
        shutil.rmtree(folder)


def _read_spec() -> str:
    data = b""
    while not data.endswith(b"\0"):
        more = os.read(CLIENT, 65536)
        if not more:
            raise PlatformError("the client of this host of local functions has ended before it began")
        data += more
    return data[:-1].decode()
