"""The function's entry on Alibaba Function Compute: the HTTP server of a custom container, `python -m` this module.

Function Compute posts to `/initialize` once for each instance, where the function has an Initializer hook, and to
`/invoke` for each event; 200 is success, 404 failure, in the status and in the header `x-fc-status`. No header says
when the service will end an event (https://www.alibabacloud.com/help/en/functioncompute/fc/context-and-log-format-1,
November 2026), so its age counts from its arrival.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from funcpipe.errors import WorkerFailed
from funcpipe.platforms import entry
from funcpipe.platforms.base import Invoked
from funcpipe.platforms.shared.cloud import unwrap_payload

PORT = "FC_SERVER_PORT"
"""The environment variable with the port to listen on, 9000 without it."""

_CREDENTIALS = {
    "x-fc-access-key-id": "OSS_ACCESS_KEY_ID",
    "x-fc-access-key-secret": "OSS_ACCESS_KEY_SECRET",
    "x-fc-security-token": "OSS_SESSION_TOKEN",
}
_OF_TIMER = {"triggerName", "triggerTime", "payload"}
_DONE, _FAILED = 200, 404
_ENVIRONMENT = entry.Environment()


class Handler(BaseHTTPRequestHandler):
    """Answers Function Compute. An instance has one event at a time."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Prepare the instance, or run a worker."""
        began_s = time.monotonic()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = self.headers.get("x-fc-request-id", "")
        match self.path:
            case "/initialize":
                _ENVIRONMENT.load()  # torch loads before the first event
                self._answer(_DONE, {"ready": True})
            case "/invoke":
                print(f"FC Invoke Start RequestId: {request}", flush=True)
                self._invoke(_payload(body.decode()), _ENVIRONMENT.invoked(at_s=began_s))
                print(f"FC Invoke End RequestId: {request}", flush=True)
            case path:
                self._answer(_FAILED, {"errorMessage": f"there is no {path}", "errorType": "NotFound"})

    def _invoke(self, payload: str, invoked: Invoked) -> None:
        with self._credentials():
            failure = _run(payload, invoked)
        entry.free_memory()
        if failure is None:
            self._answer(_DONE, {"done": True})
        else:
            print(f"{WorkerFailed.__name__}: {failure}", flush=True)
            self._answer(_FAILED, {"errorMessage": failure, "errorType": WorkerFailed.__name__})

    @contextlib.contextmanager
    def _credentials(self) -> Iterator[None]:
        """Have the role's temporary credentials, which come with each event, where storage reads them, for a while."""
        kept = {name: os.environ.get(name) for name in _CREDENTIALS.values()}
        os.environ.update({name: value for head, name in _CREDENTIALS.items() if (value := self.headers.get(head))})
        try:
            yield
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})

    def _answer(self, status: int, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("x-fc-status", str(status))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what matters is printed."""


def _run(payload: str, invoked: Invoked) -> str | None:
    """Run a worker; returns the error if it failed."""
    try:
        entry.run(unwrap_payload(payload), invoked)
    except WorkerFailed as error:
        return str(error)
    return None


def _payload(event: str) -> str:
    """Return the payload: the event, or the one that a timer's event carries."""
    try:
        value = json.loads(event)
    except ValueError:
        return event  # which is refused, and the error says why
    return str(value["payload"]) if isinstance(value, dict) and value.keys() >= _OF_TIMER else event


def main() -> None:
    """Serve until the instance ends."""
    with ThreadingHTTPServer(("0.0.0.0", int(os.environ.get(PORT, "9000"))), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
