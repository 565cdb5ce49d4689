"""One instance of Function Compute: a process of the container's entry, spoken to as the service speaks to it.

After the documentation of custom containers: it listens on its port, gets `/initialize` once if the function has an
Initializer hook (alibabacloud.com/help/en/functioncompute/latest/lifecycle-hooks-for-function-instances-7, 2025-12) and
`/invoke` for each event, with the common headers, and tells success by status and by `x-fc-status`. An instance serves
one event at a time, and the next one when that has ended (fc/function-instance-lifecycle, 2026-06).
"""

import http.client
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cloud_emulation.memory_group import MemoryGroup
from tests.cloud_emulation.moto import free_port
from tests.cloud_emulation.processes import Start, in_clean_folder
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY


class Instance:
    """One container: a process in a clean folder with a cleared environment and its size of memory.

    `began_s` is when its process began, `ready_s` when it could be invoked, `invoked_s` when each event came.
    """

    def __init__(
        self,
        function: Mapping[str, Any],
        folder: Path,
        command: list[str],
        *,
        environment: Mapping[str, str],
        lines: list[str],
        start: Start = in_clean_folder,
    ) -> None:
        self.function = function
        self._port = free_port()
        self.group = MemoryGroup(function["memorySize"])
        self.id = f"c-{uuid.uuid4().hex[:20]}"
        self.paths: list[str] = []
        self.began_s = time.monotonic()
        self.ready_s: float | None = None
        self.invoked_s: list[float] = []
        self._events: list[tuple[float, str]] = []
        self._lines = lines
        variables = {
            "FC_SERVER_PORT": str(self._port),
            **(function.get("environmentVariables") or {}),
            **environment,
        }
        self.process = start(command, folder, variables, self.group)
        self._copying = threading.Thread(target=self._copy_lines, daemon=True)
        self._copying.start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def take_events(self) -> list[tuple[float, str]]:
        """What was printed since this was last called: of an instance that has ended all of it."""
        if not self.alive:
            self._copying.join()
        count = -1
        while count != len(self._events):  # until nothing more comes
            count = len(self._events)
            time.sleep(0.02)
        taken, self._events = self._events[:count], self._events[count:]
        return taken

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self._copying.join()
        self.group.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def invoke(self, payload: bytes) -> tuple[str, str]:
        """The state and the error's message that the service notes (github.com/aliyun/fc-go-sdk/issues/5).

        What did not answer in time is ended.
        """
        began_s = time.monotonic()
        try:
            failed = None if self.ready_s else self._initialize()
            if failed is not None:
                self.kill()
                return "Failed", failed
            self.invoked_s.append(time.monotonic())
            status, fc_status, body = self._post("/invoke", payload, self.function["timeout"])
        except TimeoutError:
            self.kill()
            return "Failed", f"Function time out after {self.function['timeout']} seconds"
        except (OSError, http.client.HTTPException) as error:
            self._lines.append(str(error))
            used_mb = self.function["memorySize"] if self.group.was_exceeded() else self.group.peak_mb() or 0
            used = f"(duration: {1000 * (time.monotonic() - began_s):.0f}ms, maxMemoryUsage: {used_mb:.2f}MB)"
            return "Failed", f"Process exited unexpectedly before completing request {used}"
        if status == 200 and fc_status == "200":
            return "Succeeded", ""
        return "Failed", f"UnhandledInvocationError: {body.decode()}"

    def _initialize(self) -> str | None:
        """Make the instance ready for events; what went wrong, if anything did."""
        self._wait_until_it_listens()
        hook = self.function.get("instanceLifecycleConfig", {}).get("initializer")
        if hook is not None:
            status, _, body = self._post("/initialize", b"", hook["timeout"])
            if status != 200:
                return f"the Initializer hook failed: {body.decode()}"
        self.ready_s = time.monotonic()
        return None

    def _wait_until_it_listens(self) -> None:
        until_s = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until_s or self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def _post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, str | None, bytes]:
        self.paths.append(path)
        headers = {
            "Content-Type": "application/octet-stream",
            "x-fc-request-id": str(uuid.uuid4()),
            "x-fc-access-key-id": ACCESS_KEY,
            "x-fc-access-key-secret": SECRET_KEY,
            "x-fc-function-name": self.function["functionName"],
            "x-fc-function-memory": str(self.function["memorySize"]),
            "x-fc-function-timeout": str(self.function["timeout"]),
            "x-fc-region": REGION,
            "x-fc-account-id": "1000",
            "x-fc-control-path": path,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request("POST", path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("x-fc-status"), answer.read()
        finally:
            connection.close()

    def _copy_lines(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._events.append((time.time(), line.rstrip("\n")))
                self._lines.append(line.rstrip("\n"))
