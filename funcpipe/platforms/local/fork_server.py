"""A process with torch loaded, from which this process forks its hosts: only the first of them takes seconds to start.

It is started anew, as this process has threads and results of its own that no fork of it may have. A command that has
just loaded torch, and done nothing with it, is forked instead (`fork_from_here`): that takes milliseconds.

The server ends with the process that started it; the hosts that it forked end when they want to.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from funcpipe.core.process import ignore_ending_signals
from funcpipe.platforms.local.function import HOST, SERVER, end_after, name_process

_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from funcpipe.platforms.local.fork_server import main; main(int(sys.argv[2]), json.loads(sys.argv[3]))"
)
_STREAMS = 3  # standard input, output and error of a host
_SET_AFTERWARDS = ("FUNCPIPE_", "PYTEST_", "TMPDIR", "HF_", "TOKENIZERS_", "TORCHINDUCTOR_", "TRANSFORMERS_")
"""Variables that nothing of what a server loads reads; where another one has changed, another server is started."""


class ForkedHost:
    """A process that was forked from a server."""

    def __init__(self, ending: socket.socket, hosts: "set[ForkedHost]") -> None:
        self._ending = ending
        self._hosts = hosts
        hosts.add(self)

    def wait(self) -> None:
        """Return when it has ended."""
        with suppress(ConnectionError):
            self._ending.recv(1)
        self.forget()

    def forget(self) -> None:
        """Do not wait for it."""
        self._ending.close()
        self._hosts.discard(self)


def fork_host(
    main: str,
    *arguments: str,
    streams: tuple[int, int, int],
    listener: int,
    preload: Sequence[str],
    environment: Mapping[str, str],
) -> ForkedHost:
    """Start a process, in a session of its own, that calls `main`, `MODULE:FUNCTION`, with `listener` and `arguments`.

    `streams` are its standard input, output and error; it has this process's folder and path of modules, and the
    variables of `environment`. Modules of `preload` are imported once for all hosts.
    """
    asked = json.dumps(
        {
            "main": main,
            "arguments": arguments,
            "folder": os.getcwd(),
            "path": sys.path,
            "environment": dict(environment),
        }
    )
    try:
        return _server(tuple(preload), environment).fork(asked, (*streams, listener))
    except ConnectionError:  # the server was killed
        _servers.clear()
        return _server(tuple(preload), environment).fork(asked, (*streams, listener))


class _Server:
    """The client's side of a server: each request has a connection of its own, which is closed when its host ends."""

    def __init__(self, start: "Callable[[int], _Process]") -> None:
        """`start` starts the process, which is given the file descriptor of its end of a socket."""
        self.hosts = set[ForkedHost]()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = start(theirs.fileno())
        self._pid = os.getpid()
        atexit.register(self.close)

    def fork(self, request: str, descriptors: Sequence[int]) -> ForkedHost:
        """Ask for a host; raises ConnectionError where the server has ended."""
        mine, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"h"], [theirs.fileno()])
            socket.send_fds(mine, [b"f"], descriptors)
            mine.sendall(request.encode())
            mine.shutdown(socket.SHUT_WR)
        except BaseException:
            mine.close()
            raise
        return ForkedHost(mine, self.hosts)

    def close(self) -> None:
        """End the server, unless this process was forked from the one that started it.

        One without a host may still be loading, and is not waited for.
        """
        atexit.unregister(self.close)
        self._control.close()
        if os.getpid() == self._pid:
            if not self.hosts:
                self._process.kill()
            self._process.wait()


class _Process(Protocol):
    def kill(self) -> None: ...
    def wait(self) -> object: ...


class _Fork:
    """A process that was forked from this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        """End it; it has not been waited for."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return when it has ended."""
        os.waitpid(self._pid, 0)


def _spawn(preload: Sequence[str], environment: Mapping[str, str], control: int) -> _Process:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, json.dumps(sys.path), str(control), json.dumps(preload)],
        stdin=subprocess.DEVNULL,
        pass_fds=(control,),
        env=environment,
        start_new_session=True,
    )


def _fork(preload: Sequence[str], as_new: Callable[[], object], control: int) -> _Process:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        end_after(functools.partial(_become_server, preload, as_new, control))
    return _Fork(pid)


def _become_server(preload: Sequence[str], as_new: Callable[[], object], control: int) -> None:
    """Serve, in a process that was just forked: it keeps modules, and nothing else that a new one would not have."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(_STREAMS, control)
    os.closerange(control + 1, os.sysconf("SC_OPEN_MAX"))
    as_new()
    main(control, preload)


_servers: dict[tuple[object, ...], _Server] = {}
_servers_lock = threading.Lock()


def _server(preload: tuple[str, ...], environment: Mapping[str, str]) -> _Server:
    """The server of this process for these modules and variables; those for others end once they have no hosts."""
    key = _key(preload, environment)
    with _servers_lock:
        for other in [other for other, server in _servers.items() if other != key and not server.hosts]:
            _servers.pop(other).close()
        if key not in _servers:
            _servers[key] = _Server(functools.partial(_spawn, preload, environment))
        return _servers[key]


def begin_to_load(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server of hosts that will be asked for with this `preload` and `environment`, and return at once."""
    _server(tuple(preload), environment)


def fork_from_here(preload: Sequence[str], environment: Mapping[str, str], as_new: Callable[[], object]) -> None:
    """Make a fork of this process its server, for the time being: one that has loaded `preload` and done nothing else.

    Fork it before it computes with tensors, which makes threads that a fork does not have. `as_new` takes back, in the
    server, what this process has set up for itself.
    """
    if threading.active_count() == 1:
        _servers[_key(tuple(preload), environment)] = _Server(functools.partial(_fork, tuple(preload), as_new))


def _key(preload: tuple[str, ...], environment: Mapping[str, str]) -> tuple[object, ...]:
    loaded = frozenset(item for item in environment.items() if not item[0].startswith(_SET_AFTERWARDS))
    return os.getpid(), preload, loaded


def main(control: int, preload: Sequence[str]) -> None:
    """Fork hosts until the client, on the other end of the socket `control`, has ended."""
    name_process(SERVER)
    gc.disable()  # a fifth of the time would go into looking at modules, which all stay
    for name in preload:
        with suppress(ImportError):  # the host imports it again and says what is wrong
            importlib.import_module(name)
    gc.enable()
    gc.freeze()  # loaded modules stay, and their pages are shared with hosts longer if they are not counted
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ignore_ending_signals()
    hosts: dict[int, socket.socket] = {}
    with socket.socket(fileno=control) as requests, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _reap(hosts)
            if control in ready:
                _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
                if not descriptors:
                    return
                connection = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if pid == 0:
                    own = [requests.fileno(), selector.fileno(), woken, wake]
                    end_after(functools.partial(_become_host, connection, own, hosts))
                hosts[pid] = connection


def _reap(hosts: dict[int, socket.socket]) -> None:
    """Report ended hosts to the client."""
    for pid in [pid for pid in hosts if os.waitpid(pid, os.WNOHANG)[0]]:
        hosts.pop(pid).close()


def _become_host(connection: socket.socket, own: Sequence[int], others: Mapping[int, socket.socket]) -> None:
    """Do what the client asks for, in a process that was just forked; the server alone reports its end."""
    os.setsid()
    name_process(HOST)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in own:
        os.close(number)
    for other in others.values():
        other.close()
    with connection:
        _, (*streams, listener), _, _ = socket.recv_fds(connection, 1, _STREAMS + 1)
        with connection.makefile() as file:
            asked = json.load(file)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.set_inheritable(listener, False)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None  # it may have been looked up for another TMPDIR
    sys.path[:] = asked["path"]
    module, _, name = asked["main"].partition(":")
    getattr(importlib.import_module(module), name)(listener, *asked["arguments"])
