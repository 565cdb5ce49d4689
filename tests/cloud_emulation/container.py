"""One instance of Function Compute: a process of the container's entry, spoken to as the service speaks to it.

After the documentation of custom containers: it listens on its port, gets `/initialize` once if the function has an
Initializer hook (alibabacloud.com/help/en/functioncompute/latest/lifecycle-hooks-for-function-instances-7, 2025-12) and
`/invoke` for each event, with the common headers, and tells success by status and by `x-fc-status`.
"""

import http.client
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cloud_emulation.memory_group import MemoryGroup
from tests.cloud_emulation.moto import free_port
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY


class Instance:
    """One container: a process in a clean folder with a cleared environment and its size of memory."""

    def __init__(
        self,
        function: Mapping[str, Any],
        folder: Path,
        command: list[str],
        *,
        environment: Mapping[str, str],
        lines: list[str],
    ) -> None:
        self._function = function
        self._port = free_port()
        self._group = MemoryGroup(function["memorySize"])
        self._request = str(uuid.uuid4())
        self.id = f"c-{uuid.uuid4().hex[:20]}"
        self.events: list[tuple[float, str]] = []
        self.paths: list[str] = []
        self._lines = lines
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": f"{folder}:{site.getsitepackages()[0]}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "FC_SERVER_PORT": str(self._port),
            **(function.get("environmentVariables") or {}),
            **environment,
        }
        words = [sys.executable, "-S", *command[1:]]
        self._process = subprocess.Popen(
            words,
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=self._group.enter,
        )
        self._copying = threading.Thread(target=self._copy_lines, daemon=True)
        self._copying.start()

    def __enter__(self) -> "Instance":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        self._copying.join()
        self._group.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def invoke(self, payload: bytes) -> tuple[str, str]:
        """The state and the error's message that the service notes (github.com/aliyun/fc-go-sdk/issues/5)."""
        began_s = time.monotonic()
        try:
            self._wait_until_it_listens()
            hook = self._function.get("instanceLifecycleConfig", {}).get("initializer")
            if hook is not None:
                status, _, body = self._post("/initialize", b"", hook["timeout"])
                if status != 200:
                    return "Failed", f"the Initializer hook failed: {body.decode()}"
            status, fc_status, body = self._post("/invoke", payload, self._function["timeout"])
        except TimeoutError:
            return "Failed", f"Function time out after {self._function['timeout']} seconds"
        except (OSError, http.client.HTTPException) as error:
            self._lines.append(str(error))
            used_mb = self._function["memorySize"] if self._group.was_exceeded() else self._group.peak_mb() or 0
            used = f"(duration: {1000 * (time.monotonic() - began_s):.0f}ms, maxMemoryUsage: {used_mb:.2f}MB)"
            return "Failed", f"Process exited unexpectedly before completing request {used}"
        if status == 200 and fc_status == "200":
            return "Succeeded", ""
        return "Failed", f"UnhandledInvocationError: {body.decode()}"

    def _wait_until_it_listens(self) -> None:
        until_s = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until_s or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def _post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, str | None, bytes]:
        self.paths.append(path)
        headers = {
            "Content-Type": "application/octet-stream",
            "x-fc-request-id": self._request,
            "x-fc-access-key-id": ACCESS_KEY,
            "x-fc-access-key-secret": SECRET_KEY,
            "x-fc-function-name": self._function["functionName"],
            "x-fc-function-memory": str(self._function["memorySize"]),
            "x-fc-function-timeout": str(self._function["timeout"]),
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
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.events.append((time.time(), line.rstrip("\n")))
                self._lines.append(line.rstrip("\n"))
