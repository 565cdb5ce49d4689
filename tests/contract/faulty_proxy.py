"""A proxy between a client and a server of objects that spoils requests: what a network and a busy service do."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar
from urllib.parse import urlsplit

from tests.support.waiting import LONG_S

_OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


class FaultyProxy(ThreadingHTTPServer):
    """Passes every request on to `upstream`, except that each of `faults` takes the next request that comes.

    One whose client has given up before it was read, on a busy machine, takes none: it would be the next one's.
    """

    daemon_threads = True
    request_queue_size = 128  # or connections that come at once are reset while this machine is busy

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.upstream = urlsplit(upstream).netloc
        self.faults: list[Fault] = []
        self.requests = 0
        self.over = threading.Event()
        self.lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self, connection: socket.socket) -> "Fault | None":
        with self.lock:
            self.requests += 1
            return self.faults.pop(0) if self.faults and not _is_over(connection) else None


def _is_over(connection: socket.socket) -> bool:
    """Return whether the client has closed the connection, from which all that it sent was read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


_Proxy = TypeVar("_Proxy", bound=FaultyProxy)


@contextmanager
def answering(proxy: _Proxy) -> Iterator[_Proxy]:
    """The proxy, which answers as long as the context lasts."""
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield proxy
    finally:
        proxy.over.set()
        proxy.shutdown()
        thread.join()
        proxy.server_close()


class Exchange(BaseHTTPRequestHandler):
    """One request and its answer."""

    server: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_request(self) -> None:
        self.close_connection = True
        fault = self.server.next_fault(self.connection)
        (fault or Exchange.relay)(self)

    do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = handle_request

    def parse_request(self) -> bool:
        """Read the whole request: behind it, what the client does shows."""
        if not super().parse_request():
            return False
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return True

    def relay(self) -> None:
        self.answer(*self.ask())

    def ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The answer of the server."""
        connection = HTTPConnection(self.server.upstream, timeout=LONG_S)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _OF_THE_CONNECTION:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(self.body)))
            connection.endheaders(self.body)
            answer = connection.getresponse()
            headers = [item for item in answer.getheaders() if item[0].lower() not in _OF_THE_CONNECTION]
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        """Drop the connection without a farewell."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True  # the client, or a fault, has dropped the connection

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):
            self.close_connection = True  # so that nothing more can be written

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


Fault = Callable[[Exchange], None]


def refuses(status: int, code: str) -> Fault:
    """The service answers with an error, and does nothing."""

    def fault(exchange: Exchange) -> None:
        text = f"<Error><Code>{code}</Code><Message>of the test</Message></Error>"
        exchange.answer(status, [("Content-Type", "application/xml")], text.encode())

    return fault


def resets(exchange: Exchange) -> None:
    """The connection is lost before the service has seen the request."""
    exchange.reset()


def loses_the_answer(exchange: Exchange) -> None:
    """The service has done what was asked, and the connection is lost."""
    exchange.ask()
    exchange.reset()


def stalls(exchange: Exchange) -> None:
    """Nothing comes any more."""
    exchange.server.over.wait(LONG_S)


def breaks_off(exchange: Exchange) -> None:
    """The second half of the body is missing."""
    status, headers, body = exchange.ask()
    exchange.answer(status, headers, body[: len(body) // 2], length=len(body))


def flips_a_bit(exchange: Exchange) -> None:
    """One bit of the body is not what was written."""
    status, headers, body = exchange.ask()
    changed = bytearray(body)
    changed[len(changed) // 2] ^= 1
    exchange.answer(status, headers, bytes(changed))
