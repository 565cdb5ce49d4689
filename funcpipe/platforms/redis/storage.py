"""Objects in the memory of a Valkey or Redis server, as strings with their key, through redis-py."""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from redis import Connection, ConnectionPool, Redis, SSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy
from funcpipe.platforms.base import OPEN, Gate, batches
from funcpipe.platforms.redis.known_errors import explained
from funcpipe.platforms.redis.policy import require_no_eviction
from funcpipe.platforms.redis.wire import blocks
from funcpipe.platforms.shared.http_body import require_one_put

USER, PASSWORD = "REDIS_USERNAME", "REDIS_PASSWORD"
"""The environment's variables with the credentials."""

DEFAULT_PORT = 6379
MOST_BYTES = 512 * 2**20
"""The largest string: redis.io/docs/latest/develop/data-types/strings, and valkey.io/topics/strings."""

_SCANNED = 1000  # keys that the server scans for one answer: a millisecond of its only thread
_GLOB = re.compile(r"([\\*?\[\]])")


class RedisStorage:
    """Keys that begin with `prefix` in one database of a server. Credentials come from the environment.

    Every request is made once, in one round trip: a failure that may pass is StorageBusy, for others to try again. So
    is a server that is silent for `timeout_s`.
    """

    watches = False

    def __init__(
        self,
        host: str,
        port: int = DEFAULT_PORT,
        *,
        database: int = 0,
        prefix: str = "",
        tls: bool = False,
        timeout_s: float = 30,
    ) -> None:
        self._name = f"{'rediss' if tls else 'redis'}://{host}:{port}/{database}"
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._pool = ConnectionPool(
            connection_class=SSLConnection if tls else Connection,
            host=host,
            port=port,
            db=database,
            username=os.environ.get(USER) or None,
            password=os.environ.get(PASSWORD) or None,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 10),
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._client = Redis(connection_pool=self._pool)
        self._checked = False
        try:
            self._check()
        except StorageBusy:
            return  # the first request checks again, and is tried again for as long as others are

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        require_one_put(self._where(key), data, most_bytes=MOST_BYTES)
        body = memoryview(data).cast("B")
        condition = ("NX",) if if_absent else ()
        with self._errors_of(key), self._connection() as connection:
            with gate:
                connection.send_packed_command(blocks("SET", self._name_of(key), body, *condition))
            if connection.read_response(disable_decoding=True) is None:
                raise KeyExists(key)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing.

        An empty answer to GETRANGE may come from a missing key: EXISTS before and after it decide. The one before is
        answered ahead of the body, and so marks when the gate is to be entered. In a transaction, a server whose memory
        is full would refuse them all.
        """
        name = self._name_of(key)
        last = -1 if stop is None else max(stop - 1, start)
        commands = [("EXISTS", name), ("GETRANGE", name, start, last), ("EXISTS", name)]
        with self._errors_of(key), self._connection() as connection:
            connection.send_packed_command(connection.pack_commands(commands))
            found = connection.read_response(disable_decoding=True)
            with gate if found else nullcontext():
                data, stays = _answers(connection, len(commands) - 1)
        if not data and not (found and stays):
            raise KeyMissing(key)
        body: bytes = data
        return body if stop is None else body[: max(stop - start, 0)]

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        with self._errors_of(key):
            self._client.unlink(self._name_of(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand with each request; missing keys are not an error."""
        for batch in batches(keys):
            with self._errors_of(batch[0]):
                self._client.unlink(*map(self._name_of, batch))

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted.

        SCAN finds every key that is there from its beginning to its end, some of them twice.
        """
        pattern = _GLOB.sub(r"\\\1", self._prefix + prefix) + "*"
        with self._errors_of(prefix):
            found = {name.decode() for name in self._client.scan_iter(match=pattern, count=_SCANNED)}
        return tuple(sorted(name[len(self._prefix) :] for name in found))

    def touch(self, key: str) -> None:
        """Do nothing, as no object has an age here; raises KeyMissing."""
        with self._errors_of(key):
            if not self._client.exists(self._name_of(key)):
                raise KeyMissing(key)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause for `timeout_s`, or until `cancel` is set: the server is not asked to notify."""
        cancel.wait(timeout_s)

    def _check(self) -> None:
        if not self._checked:
            with _explaining(self._name):
                require_no_eviction(self._client, self._name)
            self._checked = True

    def _name_of(self, key: str) -> str:
        return self._prefix + key

    def _where(self, key: str) -> str:
        return f"{self._name}: {self._prefix}{key}"

    @contextmanager
    def _errors_of(self, key: str) -> Iterator[None]:
        self._check()
        with _explaining(self._where(key)):
            yield

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection, which is closed where an answer may be left on it."""
        connection = self._pool.get_connection()
        try:
            yield connection
        except (KeyExists, ResponseError):
            raise  # all was read
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        finally:
            self._pool.release(connection)


@contextmanager
def _explaining(where: str) -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise explained(where, error) from error


def _answers(connection: Any, count: int) -> list[Any]:
    """Return the next `count` answers, of which all are read; raises the first that is an error."""
    answers: list[Any] = []
    for _ in range(count):
        try:
            answers.append(connection.read_response(disable_decoding=True))
        except ResponseError as error:
            answers.append(error)
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise answer
    return answers
