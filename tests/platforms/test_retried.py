"""Failures that pass: at the storage, and between a real client and a real server."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.memory import MemoryStorage
from funcpipe.platforms.s3 import S3Storage
from funcpipe.platforms.wrappers import Retried


class Flaky(MemoryStorage):
    """Fails as often as told, before or after a request has had its effect."""

    def __init__(self, failures: int, *, after: bool = False) -> None:
        super().__init__()
        self.failures, self.after = failures, after

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if not self.after:
            self.fail()
        super().put(key, data, if_absent=if_absent, gate=gate)
        self.fail()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        self.fail()
        return super().get(key, start=start, stop=stop, gate=gate)

    def fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageBusy("later")


def retried(store: MemoryStorage, pauses: list[float]) -> Retried:
    return Retried(store, attempts=4, first_s=0.1, most_s=0.3, sleep=pauses.append, draw=lambda: 0.5)


def test_requests_are_made_again_after_growing_pauses() -> None:
    pauses: list[float] = []
    store = Flaky(3)
    retried(store, pauses).put("k", b"1")
    assert pauses == pytest.approx([0.05, 0.1, 0.15])
    assert store.get("k") == b"1"
    with pytest.raises(KeyMissing):
        retried(store, pauses).get("none")


def test_a_storage_that_stays_busy_is_an_error() -> None:
    pauses: list[float] = []
    with pytest.raises(StorageBusy):
        retried(Flaky(4), pauses).get("k")
    assert len(pauses) == 3


def test_a_conditional_put_whose_answer_was_lost_has_succeeded() -> None:
    store = Flaky(1, after=True)
    retried(store, []).put("lease", b"mine", if_absent=True)
    assert store.get("lease") == b"mine"
    with pytest.raises(KeyExists):
        retried(store, []).put("lease", b"mine", if_absent=True)
    store.failures = 1
    store.after = False
    with pytest.raises(KeyExists):
        retried(store, []).put("lease", b"yours", if_absent=True)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[bytes]]]:
    """An endpoint that gives each connection the next of the answers, and closes it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    todo: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(todo.pop(0))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", todo
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def answer(status: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode() + body


BUSY = {
    "500": answer("500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>"),
    "503": answer("503 Slow Down", b"<Error><Code>SlowDown</Code></Error>"),
    "429": answer("429 Too Many Requests", b"<Error><Code>TooMany</Code></Error>"),
    "truncated body": answer("200 OK", b"hal", 10),
    "no answer": b"",
}


@pytest.mark.parametrize("failure", BUSY)
def test_failures_that_pass_are_told_apart_and_retried(answers: tuple[str, list[bytes]], failure: str) -> None:
    endpoint, todo = answers
    store = S3Storage("bucket", endpoint=endpoint)
    todo.append(BUSY[failure])
    with pytest.raises(StorageBusy) as busy:
        store.get("k")
    assert "very-secret" not in str(busy.value)
    todo += [BUSY[failure], BUSY[failure], answer("200 OK", b"whole")]
    assert Retried(store, sleep=lambda _: None).get("k") == b"whole"
    assert todo == []


def test_a_refusal_is_final(answers: tuple[str, list[bytes]]) -> None:
    endpoint, todo = answers
    todo.append(answer("403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"))
    with pytest.raises(StorageError, match=r"AccessDenied \(403\): no") as refused:
        Retried(S3Storage("bucket", endpoint=endpoint)).get("k")
    assert not isinstance(refused.value, StorageBusy)


def test_a_request_that_cannot_be_sent_is_not_tried_again(answers: tuple[str, list[bytes]]) -> None:
    pauses: list[float] = []
    with pytest.raises(StorageError, match="Invalid bucket name") as refused:
        Retried(S3Storage("no/bucket", endpoint=answers[0]), sleep=pauses.append).get("k")
    assert not isinstance(refused.value, StorageBusy)
    assert pauses == []
