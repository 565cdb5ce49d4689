"""AWS Lambda's side of a function: a server of the Runtime API, with the real runtime client as its only guest.

After the documentation of the Runtime API: `next`, `response`, `error` and `init/error`. An environment is one process
of `awslambdaric` on the contents of an image, in a clean folder and with a cleared environment; it serves one
invocation at a time, is used again, is killed at its deadline, and may not have more memory than its size.
"""

import contextlib
import json
import os
import queue
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.cloud_emulation.images import unreadable
from tests.cloud_emulation.memory_group import MemoryGroup
from tests.cloud_emulation.processes import Process, Start, in_clean_folder

REGION, ACCOUNT = "us-east-1", "123456789012"


@dataclass(frozen=True, kw_only=True)
class Function:
    """What the control plane knows of a function."""

    name: str
    image: Path
    handler: str
    memory_mb: int
    timeout_s: float
    environment: Mapping[str, str]
    version: str = "$LATEST"
    alias: str | None = None
    kept_ready: bool = False

    @property
    def arn(self) -> str:
        which = "" if self.alias is None else f":{self.alias}"
        return f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{self.name}{which}"


@dataclass(kw_only=True)
class Invocation:
    """One event on its way through an environment; `answer` is what the function said, or what befell it.

    `trace` is the header that the function passes on to what it invokes.
    """

    request_id: str
    payload: bytes
    trace: str = ""
    deadline_s: float = 0.0
    status: str = ""
    error_type: str = ""
    answer: bytes = b""
    peak_mb: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, status: str, answer: bytes, error_type: str = "") -> None:
        if not self.ended.is_set():
            self.status, self.answer, self.error_type = status, answer, error_type
            self.ended.set()


class Environment:
    """One execution environment; `say` gets each line that the function prints.

    `stream` is its log stream, `events` what it has printed since `take_events` was last called, with the moments.
    `began_s` is when its process began, `ready_s` when that first asked for an invocation, `invoked_s` when each came.
    """

    def __init__(self, function: Function, say: Callable[[str], None], start: Start = in_clean_folder) -> None:
        self.function = function
        self._begin = start
        moment = time.strftime("%Y/%m/%d", time.gmtime())
        self.stream = f"{moment}/{function.name}[{function.version}]{uuid.uuid4().hex}"
        self.events: list[tuple[int, str]] = []
        self.invocations: queue.Queue[Invocation] = queue.Queue()
        self.current: Invocation | None = None
        self.init_error = b""
        self._closing, self._closed = threading.Lock(), False
        self._say = say
        self._server = _RuntimeServer(self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.group = MemoryGroup(function.memory_mb)
        self.began_s = time.monotonic()
        self.ready_s: float | None = None
        self.invoked_s: list[float] = []
        self.process = self._start()
        self._copying = threading.Thread(target=self._copy_lines, daemon=True)
        self._copying.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def busy(self) -> bool:
        return self.alive and self.current is not None

    def run(self, invocation: Invocation) -> None:
        """Serve `invocation`; returns when it has ended, one way or another."""
        hidden = unreadable(self.function.image)
        if hidden is not None:
            text = f"Unable to import module '{self.function.handler}': [Errno 13] Permission denied: '{hidden}'"
            invocation.end("error", _error("Runtime.ImportModuleError", text), "Runtime.ImportModuleError")
            return
        invocation.deadline_s = time.time() + self.function.timeout_s
        self.current = invocation
        self.invoked_s.append(time.monotonic())
        self.invocations.put(invocation)
        while not invocation.ended.wait(0.02):
            if not self.alive:
                self._explain_death(invocation)
            elif time.time() > invocation.deadline_s:
                self.close()
                late = f"Task timed out after {self.function.timeout_s:.2f} seconds"
                text = f"RequestId: {invocation.request_id} Error: {late}"
                invocation.end("timeout", _error("Sandbox.Timedout", text))
        invocation.peak_mb = self.group.peak_mb() or _peak_mb(self.process.pid)
        self.current = None

    def take_events(self) -> list[tuple[int, str]]:
        """What was printed: by a function that has ended all of it, else what has come a moment after its answer."""
        if not self.alive:
            self._copying.join()
        count = -1
        while count != len(self.events):  # until nothing more comes
            count = len(self.events)
            time.sleep(0.02)
        taken, self.events = self.events[:count], self.events[count:]
        return taken

    def close(self) -> None:
        """End it, if that has not been done: its number may be another's by now."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._close()

    def _close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._copying.join()
        self._server.shutdown()
        self._server.server_close()
        self.group.close()

    def _start(self) -> Process:
        variables = {
            "LANG": "en_US.UTF-8",
            "TZ": ":UTC",
            "LAMBDA_TASK_ROOT": "/var/task",
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self._server.server_address[1]}",
            "AWS_LAMBDA_FUNCTION_NAME": self.function.name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(self.function.memory_mb),
            "AWS_LAMBDA_FUNCTION_VERSION": self.function.version,
            "AWS_LAMBDA_LOG_FORMAT": "JSON",
            "AWS_LAMBDA_INITIALIZATION_TYPE": ("provisioned-concurrency" if self.function.kept_ready else "on-demand"),
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            **self.function.environment,
        }
        command = ("python", "-m", "awslambdaric", self.function.handler)
        return self._begin(command, self.function.image, variables, self.group)

    def _copy_lines(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.events.append((int(time.time() * 1000), line.rstrip("\n")))
                self._say(line.rstrip("\n"))

    def _explain_death(self, invocation: Invocation) -> None:
        code = self.process.wait()
        if self.init_error:
            invocation.end("error", self.init_error, "Runtime.InitError")
        elif code == -signal.SIGKILL and self.group.was_exceeded():
            text = f"RequestId: {invocation.request_id} Error: Runtime exited with error: signal: killed"
            invocation.end("error", _error("Runtime.OutOfMemory", text), "Runtime.OutOfMemory")
        else:
            how = f"signal: {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            text = f"RequestId: {invocation.request_id} Error: Runtime exited with error: {how}"
            invocation.end("error", _error("Runtime.ExitError", text), "Runtime.ExitError")


class _RuntimeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # or connections that come at once are reset while this machine is busy

    def __init__(self, environment: Environment) -> None:
        super().__init__(("127.0.0.1", 0), _RuntimeHandler)
        self.environment = environment


class _RuntimeHandler(BaseHTTPRequestHandler):
    server: _RuntimeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if self.path != "/2018-06-01/runtime/invocation/next":
            self._answer(404)
            return
        if self.server.environment.ready_s is None:
            self.server.environment.ready_s = time.monotonic()
        invocation = self.server.environment.invocations.get()
        headers = {
            "Lambda-Runtime-Aws-Request-Id": invocation.request_id,
            "Lambda-Runtime-Deadline-Ms": str(int(invocation.deadline_s * 1000)),
            "Lambda-Runtime-Invoked-Function-Arn": self.server.environment.function.arn,
            "Lambda-Runtime-Trace-Id": invocation.trace,
            "Content-Type": "application/json",
        }
        self._answer(200, invocation.payload, headers)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        environment = self.server.environment
        if self.path == "/2018-06-01/runtime/init/error":
            environment.init_error = body
            self._answer(202)
            return
        match = re.fullmatch(r"/2018-06-01/runtime/invocation/([\w-]+)/(response|error)", self.path)
        current = environment.current
        if match is None or current is None or match[1] != current.request_id:
            self._answer(404)
            return
        self._answer(202)
        if match[2] == "response":
            current.end("success", body)
        else:
            current.end("failure", body, self.headers.get("Lambda-Runtime-Function-Error-Type", "Unhandled"))

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def one_environment(function: Function, start: Start = in_clean_folder) -> Iterator[tuple[Environment, list[str]]]:
    """An environment, and the lines that its function has printed."""
    lines: list[str] = []
    environment = Environment(function, lines.append, start)
    try:
        yield environment, lines
    finally:
        environment.close()


def _error(kind: str, message: str) -> bytes:
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()


def _peak_mb(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(match[1]) // 1024 if match else 0
