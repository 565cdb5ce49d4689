"""Functions as processes of this machine, forked by a host that has torch loaded."""

import contextlib
import importlib
import io
import json
import os
import shutil
import socket
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

from funcpipe.core import Invocation, Plan, PlatformSpec, to_text
from funcpipe.core.cached import cached_property
from funcpipe.core.json_form import from_plain
from funcpipe.core.logs import RawLine
from funcpipe.errors import InvalidValue, PlanError, PlatformError
from funcpipe.platforms.base import Handle, PlainKeys, Status
from funcpipe.platforms.gpus import check_room, usable_gpus
from funcpipe.platforms.local.fork_server import ForkedHost, begin_to_load, fork_from_here, fork_host
from funcpipe.platforms.local.output import read_logs
from funcpipe.platforms.process import environment

SCHEME = "local"
_SOCKET = "socket"
_HOST_MODULE = "funcpipe.platforms.local.host"
_LONGEST_PATH = 100  # of a Unix socket; Linux takes 107 bytes, macOS 103


class LocalPlatform(PlainKeys):
    """The functions of the host at `url`, `local:///folder/socket`; raises PlatformError where there is none.

    Logs are those of all hosts of this machine, whether they still run or not.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.detached = False
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    @cached_property
    def spec(self) -> PlatformSpec:
        """The specification of the platform."""
        spec: PlatformSpec = from_plain(PlatformSpec, self._ask("describe")["spec"], source=self.url)
        return spec

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Raise PlatformRefused where GPUs of this machine have no room for all functions at once; `invoke` says what
        else is too large.
        """
        if any(self.spec.accelerates(stage.size) for stage in plan.stages):
            check_room(plan, self.spec, usable_gpus())

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once."""
        payload = to_text(worker)
        size, most = len(payload.encode()), self.spec.max_payload_bytes
        if size > most:
            raise PlanError(
                f"the invocation payload of worker {worker.worker} has {size} bytes, more than the {most} "
                f"that {self.spec.name} takes; use fewer stages or shorter names"
            )
        answer = self._ask("invoke", worker=worker.worker, size=worker.size, payload=payload)
        for text in answer["warnings"]:
            warnings.warn(text, stacklevel=2)
        handle: Handle = from_plain(Handle, answer["handle"], source=self.url)
        return handle

    def status(self, handle: Handle) -> Status:
        """Return the function's state; the reason names the signal that killed a process."""
        status: Status = from_plain(Status, self._ask("status", name=handle.name)["status"], source=self.url)
        return status

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended. A host that has ended ended its functions."""
        try:
            self._ask("stop", name=handle.name)
        except PlatformError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # its socket is left only if the host was killed
                raise

    def detach(self) -> None:
        """Let the functions, and those that they start, run on when this client ends."""
        self._ask("detach")
        self.detached = True

    def logs(self, run: str) -> Iterator[RawLine]:
        """Return the lines that functions of the run have written on this machine, and its client."""
        return read_logs(run)

    def _ask(self, verb: str, **words: str) -> Any:
        try:
            with self._lock:
                connection, self._connection = self._connection or self._connect(), None
                answer = connection.ask({"verb": verb, **words})
                self._connection = connection  # one that was interrupted is not used again
        except OSError as error:
            raise PlatformError(f"there is no host of local functions at {self.url} any more ({error})") from error
        if "error" in answer:
            raise PlatformError(answer["error"])
        return answer

    def _connect(self) -> "_Connection":
        parts = urlsplit(self.url)
        if parts.scheme != SCHEME or parts.netloc or not parts.path:
            raise InvalidValue(
                "platform", self.url, "must be the URL of a host, such as local:///tmp/funcpipe-1/socket"
            )
        return _Connection(unquote(parts.path))


class _Connection:
    """A connection to a host: a line with a JSON object each way."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rb")
        self._close = weakref.finalize(self, _close, self._socket, self._lines)

    def ask(self, request: object) -> Any:
        """Return the answer; raises OSError where there is none."""
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        answer = self._lines.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionError("it has ended")
        return json.loads(answer)


def _close(*resources: socket.socket | BinaryIO) -> None:
    for resource in resources:
        resource.close()


@contextlib.contextmanager
def local_functions(
    spec: PlatformSpec,
    entry: str,
    *,
    preload: Sequence[str] = (),
    imposed: bool = False,
    silent: bool = False,
    watches: bool = False,
    load: str = "",
) -> Iterator[LocalPlatform]:
    """A platform whose functions call `entry`, `MODULE:FUNCTION`, with the invocation payload, as JSON text.

    Their host imports the modules `preload` once. With `imposed`, the limits of `spec` hold for each function, as far
    as this system can impose them; a warning names those that it cannot. With `silent`, what functions print is kept in
    their logs only: they do not hold on to the client's output. With `watches`, each run that is left to itself gets a
    watchdog, which `entry` is called for too. `load`, `MODULE:FUNCTION` too, returns for a payload what templates keep
    for functions of the same stage, without limits.

    Afterwards no function runs, unless the platform was detached.
    """
    from funcpipe.platforms.local.host import HostSpec  # with asyncio, which a run that is refused does without

    folder = _private_folder()
    host, telling = _start_host(folder, preload, silent=silent)
    platform = LocalPlatform(f"{SCHEME}://{quote(folder)}/{_SOCKET}")
    with contextlib.suppress(BrokenPipeError):  # the host has ended: the first request says so
        host_spec = HostSpec(
            entry=entry, preload=tuple(preload), spec=spec, imposed=imposed, watches=watches, load=load
        )
        telling.write(to_text(host_spec).encode() + b"\0")
    try:
        yield platform
    finally:
        telling.close()
        if platform.detached:
            host.forget()
        else:
            host.wait()
            shutil.rmtree(folder, ignore_errors=True)  # it is gone unless the host was killed


def preload_functions(preload: Sequence[str]) -> None:
    """Begin to load what functions with this `preload` need, in another process: they are wanted in a while."""
    begin_to_load((*preload, _HOST_MODULE), environment())


def fork_hosts_from_here(preload: Sequence[str], *, as_new: Callable[[], object]) -> None:
    """Load what hosts of local functions need, and have those with this `preload` forked from this process: see
    `fork_from_here`.

    Not where functions need another allocator than this process has.
    """
    variables = environment()
    if variables == dict(os.environ):
        modules = (*preload, _HOST_MODULE)
        for name in modules:
            importlib.import_module(name)
        fork_from_here(modules, variables, as_new)


def _start_host(folder: str, preload: Sequence[str], *, silent: bool) -> tuple[ForkedHost, io.FileIO]:
    """Start a host that serves in `folder`; returns it and the pipe that instructs it, and closes at the end."""
    reading, writing = os.pipe()
    telling = io.FileIO(writing, "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(folder, _SOCKET))
            listener.listen()
            streams = [nowhere if silent or not _is_open(number) else number for number in (1, 2)]
            host = fork_host(
                f"{_HOST_MODULE}:main",
                folder,
                streams=(reading, streams[0], streams[1]),
                listener=listener.fileno(),
                preload=(*preload, _HOST_MODULE),
                environment=environment(),
            )
    except BaseException:
        telling.close()
        raise
    finally:
        os.close(reading)
        os.close(nowhere)
    return host, telling


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _private_folder() -> str:
    """Make a private folder, with a path short enough for a socket in it."""
    parent = tempfile.gettempdir()
    if len(os.path.join(parent, "funcpipe-12345678", _SOCKET)) > _LONGEST_PATH:
        parent = "/tmp"
    return str(Path(tempfile.mkdtemp(prefix="funcpipe-", dir=parent)).resolve())
