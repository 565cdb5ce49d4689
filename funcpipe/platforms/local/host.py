"""The host of local functions: a process that forks them, in a fraction of a second, and knows their state.

It has loaded what functions need, and is asked through a Unix socket by its client and by functions: each request and
each answer is a line with a JSON object. It ends when its client has ended, and all functions with it; if the client
has said `detach`, when the last function has ended, and the watchdog of each run that is left to itself.
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
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from funcpipe.core import PlatformSpec, WatchSpec, from_text, to_text
from funcpipe.core.json_form import to_plain
from funcpipe.core.process import ENDING
from funcpipe.core.start import Readiness, StartPart
from funcpipe.errors import InvalidValue, PlatformError
from funcpipe.platforms.base import Handle, Invoked, StartClock, State, Status
from funcpipe.platforms.gpus import VISIBLE, FunctionGpu, placed_on, usable_gpus
from funcpipe.platforms.local.function import fork, kill, status_of
from funcpipe.platforms.local.limits import FunctionLimits, Groups, ImposedLimits
from funcpipe.platforms.local.output import FunctionOutput, print_into
from funcpipe.platforms.local.readiness import Start, Starts, tell
from funcpipe.platforms.local.template import Request, Template, adopt_orphans
from funcpipe.platforms.process import usable_processors
from funcpipe.platforms.shared.host import STOPPED, Host, HostedFunction

CLIENT = 0
"""The file descriptor of the pipe whose other end is the client's: it closes when the client ends."""

_WATCHDOG = "watchdog"
_LONGEST_REQUEST = 1 << 30  # bytes; what a platform admits as a payload is checked where it is invoked


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The client's instructions to a host: the `MODULE:FUNCTION` that functions call, and modules to load before.

    The limits of `spec` are either `imposed` on functions or not. With `watches`, detached runs get a watchdog. `load`,
    `MODULE:FUNCTION` too, returns for a payload what functions of the same stage may find loaded: with it, and without
    limits, there are templates.
    """

    FORMAT: ClassVar[str] = "funcpipe.host/1"

    entry: str
    preload: tuple[str, ...]
    spec: PlatformSpec
    imposed: bool
    watches: bool = False
    load: str = ""


@dataclass(kw_only=True)
class _Function(HostedFunction):
    """A function that is a process of this machine.

    Its temporary files lie in the folder `temporary`, as in `/tmp` of a cloud function, and are deleted when it ends,
    however it ends. `gpu` is what it has of one.
    """

    pid: int
    function_limits: FunctionLimits | None
    output: FunctionOutput
    temporary: str
    gpu: FunctionGpu | None
    late: bool = False


class LocalHost(Host[_Function]):
    """The functions of one client, and the connections that ask for them."""

    def __init__(
        self,
        spec: HostSpec,
        limits: ImposedLimits | None,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        folder: str,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._limits = limits
        self._folder = folder
        self._warned: set[str] = set()
        self._listener = listener
        self._selector = selector
        self._entry = _load(spec.entry)
        self._gpus = usable_gpus() if any(size.accelerator for size in spec.spec.sizes) else ()
        has_templates = bool(spec.load) and limits is None and adopt_orphans()
        self._starts = Starts(self._make_template) if has_templates else None
        self._specs: dict[str, WatchSpec] = {}
        self._functions_end, self._own_end = os.pipe()
        self._client_runs, self._detached = True, False
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Answer requests until this host is not needed any more; no function runs afterwards."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in ENDING:
            loop.add_signal_handler(number, self._asked_to_end)
        loop.add_reader(CLIENT, self._client_ended)
        server = await asyncio.start_unix_server(self._converse, sock=self._listener, limit=_LONGEST_REQUEST)
        await self._over.wait()
        server.close()
        if self._starts is not None:
            self._starts.close()
        for function in list(self._functions.values()):
            await self._end(function)
            function.output.close()
        if self._limits is not None:
            self._limits.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests, in order, until it is closed or this host ends."""
        try:
            while (request := await reader.readline()).endswith(b"\n"):
                answer = await self._answer(json.loads(request))
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request:
                case {"verb": "describe"}:
                    return {"spec": to_plain(self._spec.spec)}
                case {"verb": "invoke", "worker": worker, "size": size, "payload": payload}:
                    return {"handle": to_plain(self._invoke(worker, size, payload)), "warnings": self._warnings()}
                case {"verb": "status", "name": name}:
                    return {"status": to_plain(self._function(name).status)}
                case {"verb": "stop", "name": name}:
                    await self._end(self._function(name))
                    return {}
                case {"verb": "detach"}:
                    self._detach()
                    return {}
                case _:
                    raise PlatformError(f"the host of local functions does not understand {request.get('verb')!r}")
        except (PlatformError, InvalidValue) as error:
            return {"error": str(error)}

    def _invoke(self, worker: str, size: str, payload: str) -> Handle:
        running, most = self._running(), self._spec.spec.max_functions
        if running >= most:
            raise PlatformError(f"{running} functions run, as many as {self._spec.spec.name} allows at once")
        gpu = placed_on(self._gpus, self._spec.spec, size, beside=self._gpus_held())
        function_limits = None if self._limits is None else self._limits.of_function(size)
        invocation = json.loads(payload)
        run, run_key = invocation["run"], invocation.get("run_key", "")
        function = self._start(run, worker, payload, function_limits, gpu)
        self._specs[run] = WatchSpec(storage=invocation["storage"], run=run, run_key=run_key, until_ended=True)
        handle = Handle(worker=worker, name=f"function {len(self._functions) + 1}, process {function.pid}")
        self._functions[handle.name] = function
        if function_limits is not None and function_limits.lifetime_s is not None:
            asyncio.get_running_loop().call_later(function_limits.lifetime_s, self._time_out, function)
        return handle

    def _gpus_held(self) -> list[FunctionGpu]:
        """Return what running functions have of GPUs."""
        running = (function.gpu for function in self._functions.values() if not function.ended.is_set())
        return [gpu for gpu in running if gpu is not None]

    def _start(
        self, run: str, worker: str, payload: str, limits: FunctionLimits | None, gpu: FunctionGpu | None
    ) -> _Function:
        output = None
        try:
            temporary = tempfile.mkdtemp(prefix="tmp-", dir=self._folder)
            output = _output(worker, payload)
            variables = {"TMPDIR": temporary} | ({} if gpu is None else {VISIBLE: gpu.uuid})
            pid = self._fork(payload, limits, output, variables)
        except OSError as error:
            if output is not None:
                output.abandon()
            if self._limits is not None and limits is not None:
                self._limits.release(limits)
            raise PlatformError(f"no function can be started: {error.strerror}") from error
        output.copy(asyncio.get_running_loop())
        return _Function(run=run, pid=pid, function_limits=limits, output=output, temporary=temporary, gpu=gpu)

    def _fork(
        self, payload: str, function_limits: FunctionLimits | None, output: FunctionOutput, variables: dict[str, str]
    ) -> int:
        """Return the number of the process of a new function."""
        start = None if self._starts is None else self._starts.begin(payload)
        try:
            if start is not None and start.template is not None:
                request = {"payload": payload, "variables": variables, "log": output.path}
                with suppress(OSError):  # the template has ended, and the host does what it did
                    return start.template.fork(request, (*output.ends, start.says))
            begun = partial(self._become, payload, function_limits, output, variables, start)
            return fork(begun, lifeline=self._functions_end)
        finally:
            if start is not None:
                os.close(start.says)

    def _make_template(self, payload: str) -> Template:
        load = partial(_load(self._spec.load), payload)
        return Template(self._leave, load, self._begin, lifeline=self._functions_end)

    def _detach(self) -> None:
        for spec in self._specs.values() if self._spec.watches and not self._detached else ():
            self._watch(spec)
        self._detached = True

    def _start_watchdog(self, spec: WatchSpec) -> _Function:
        watchdog = self._start("", _WATCHDOG, to_text(spec), None, None)
        self._functions[f"{_WATCHDOG} {watchdog.pid} of {spec.run}"] = watchdog
        return watchdog

    def _unwatched(self) -> None:
        self._end_if_alone()

    def _leave(self) -> object:
        """Leave what is the host's, in a process just forked; what is returned must be kept."""
        os.close(self._own_end)
        kept = list(self._selector.get_map().values())  # or Python complains of the host's tasks, which go with them
        for key in kept:
            if key.fd != CLIENT:
                os.close(key.fd)
        self._selector.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), CLIENT)
        return kept

    def _become(
        self,
        payload: str,
        function_limits: FunctionLimits | None,
        output: FunctionOutput,
        variables: dict[str, str],
        start: Start | None,
    ) -> None:
        """Turn this process, just forked, into a function."""
        _ = self._leave()
        _take_on(variables)
        output.enter_function()
        if function_limits is None:
            if start is None:
                self._entry(payload)
            else:
                self._entry(payload, Invoked(start=StartClock(Readiness.IMPORTED, ready=tell(start.says))))
            return
        init_s = function_limits.impose()
        payload = function_limits.payload(payload)
        clock = StartClock(parts={StartPart.INTERPRETER: init_s})
        self._entry(payload, *([Invoked(init_s=init_s, start=clock)] if init_s else []))

    def _begin(self, request: Request, pipes: Sequence[int], loaded: object) -> None:
        """Turn a process that a template has forked into a function."""
        *ends, says = pipes
        _take_on(request["variables"])
        print_into(ends, request["log"])
        clock = StartClock(Readiness.TEMPLATE, ready=tell(says))
        self._entry(request["payload"], Invoked(start=clock, template=loaded))

    def _warnings(self) -> list[str]:
        """Return new warnings for the client, about limits that do not hold and logs that are not kept."""
        troubles = [function.output.trouble for function in self._functions.values() if function.output.trouble]
        found = [*(self._limits.warnings() if self._limits is not None else ()), *troubles]
        new = [text for text in dict.fromkeys(found) if text not in self._warned]
        self._warned.update(new)
        return new

    def _function(self, name: str) -> _Function:
        if name not in self._functions:
            raise PlatformError(f"the host of local functions never started {name!r}")
        return self._functions[name]

    def _kill(self, function: _Function) -> None:
        if not function.ended.is_set():
            kill(function.pid)

    def _reap(self) -> None:
        """Note which functions have ended; what they started ends with them."""
        running = {function.pid: function for function in self._functions.values() if not function.ended.is_set()}
        with suppress(ChildProcessError):  # there is none left
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                function = running.get(found.si_pid)
                if function is not None:
                    kill(function.pid)
                _, exit_status = os.waitpid(found.si_pid, 0)
                if function is not None:
                    self._has_ended(function, exit_status)
                elif self._starts is not None:
                    self._starts.lost(found.si_pid)
        self._end_if_alone()

    def _has_ended(self, function: _Function, exit_status: int) -> None:
        function.status = self._last_status(function, exit_status)
        failed = function.status.state is State.FAILED
        function.output.end(function.status.reason if failed else None)
        shutil.rmtree(function.temporary, ignore_errors=True)
        function.ended.set()

    def _last_status(self, function: _Function, exit_status: int) -> Status:
        status = STOPPED if function.is_stopped else status_of(exit_status)
        if function.function_limits is None or self._limits is None:
            return status
        try:
            return status if function.is_stopped else function.function_limits.explain(status, late=function.late)
        finally:
            self._limits.release(function.function_limits)

    def _time_out(self, function: _Function) -> None:
        if not function.ended.is_set():
            function.late = True
            kill(function.pid)

    def _client_ended(self) -> None:
        if not os.read(CLIENT, 1):
            asyncio.get_running_loop().remove_reader(CLIENT)
            self._client_runs = False
            self._end_if_alone()

    def _asked_to_end(self) -> None:
        """End functions that have no client any more; a client that is asked too lets its own save a step."""
        if not self._client_runs:
            self._over.set()

    def _end_if_alone(self) -> None:
        if not self._client_runs and not (self._detached and (self._running() or self._watchdogs)):
            self._over.set()


def _take_on(variables: dict[str, str]) -> None:
    """Have these variables in the environment of this process, just forked."""
    os.environ |= variables
    tempfile.tempdir = variables["TMPDIR"]


def _load(entry: str) -> Callable[..., None]:
    module, _, name = entry.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    return function


def _output(worker: str, payload: str) -> FunctionOutput:
    invocation = json.loads(payload)
    return FunctionOutput(run=invocation["run"], worker=worker, attempt=invocation.get("attempt", 0))


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
            runner.run(LocalHost(spec, limits, socket.socket(fileno=listener), selector, folder).serve())
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
