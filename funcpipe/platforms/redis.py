"""Objects in the memory of a Valkey or Redis server, as strings with their key, through redis-py."""

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from redis import Connection, ConnectionPool, Redis, SSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry

from funcpipe.errors import FuncPipeError, KeyExists, KeyMissing, PlatformRefused, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate, batches
from funcpipe.platforms.shared.objects import require_one_put

_log = logging.getLogger(__name__)

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

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, and hashes of what is there, which is read for that."""
        found: dict[str, str] = {}
        for batch in batches(self.list(prefix)):
            with self._errors_of(prefix):
                bodies = self._client.mget([self._name_of(key) for key in batch])
            named = zip(batch, bodies, strict=True)
            found |= {key: hashlib.sha256(body).hexdigest() for key, body in named if isinstance(body, bytes)}
        return found

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


_REFUSED: dict[type[RedisError], str] = {
    AuthenticationError: "set REDIS_PASSWORD, and REDIS_USERNAME where the server has users",
    AuthorizationError: "set REDIS_PASSWORD, and REDIS_USERNAME where the server has users",
    NoPermissionError: "let the user do @read, @write, SELECT, SCAN and INFO on keys of the prefix",
    ReadOnlyError: "this server is a replica; give the address of its primary",
    MovedError: "the server is part of a cluster, whose nodes hold some keys each; give a server that is not",
    AskError: "the server is part of a cluster, whose nodes hold some keys each; give a server that is not",
}
_FULL = (
    "the server's memory is full; raise its maxmemory, delete runs that are over (funcpipe clean), or train with more "
    "stages or smaller micro-batches"
)
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_TRUST = "name the host as its certificate does, and set SSL_CERT_FILE to the certificates of who signed it"
_NOT_REACHED = re.compile("^(Error|Timeout) .*connecting to")
_PASSING = (ConnectionError, TimeoutError, ClusterDownError, MasterDownError, TryAgainError)
_PASSING_CODES = ("BUSY ", "LOADING ", "NOREPLICAS ", "MISCONF ")


def explained(where: str, error: RedisError) -> FuncPipeError:
    """Return funcpipe's error for `error`; `where` names server and key."""
    for kind, remedy in _REFUSED.items():
        if isinstance(error, kind):
            return PlatformRefused(f"{where}: {error}; {remedy}")
    if isinstance(error, OutOfMemoryError):
        return StorageError(f"{where}: {error}; {_FULL}")
    if _UNTRUSTED in str(error):
        return PlatformRefused(f"{where}: {error}; {_TRUST}")
    if _NOT_REACHED.search(str(error)):
        return StorageBusy(f"{where}: {error} See that a server runs there, and that this machine may reach it.")
    passing = isinstance(error, _PASSING) or str(error).startswith(_PASSING_CODES)
    return (StorageBusy if passing else StorageError)(f"{where}: {error}")


def require_no_eviction(client: Redis, where: str) -> None:
    """Raise PlatformRefused if the server, once its memory is full, may evict keys that have no time to live.

    A run's objects have none, so `volatile-…` policies keep them. INFO reports the policy, also on managed services,
    which forbid CONFIG.
    """
    try:
        info = client.info("memory")
    except NoPermissionError:
        _log.warning(
            "%s: this user may not call INFO, so it is not known whether the server evicts objects that a run still "
            "needs; allow INFO, or make sure that maxmemory-policy is noeviction",
            where,
        )
        return
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        raise PlatformRefused(
            f"{where}: the server's maxmemory-policy is {policy}, so it may evict objects that a run waits for; set it "
            "to noeviction (CONFIG SET maxmemory-policy noeviction, or the parameter group of a managed service), or "
            "use another server"
        )


_LARGE_BYTES = 64 * 1024
_BLOCK_BYTES = 1024 * 1024  # sent by one call, so that the timeout is one of silence and not of the whole object


def blocks(*words: str | bytes | memoryview) -> Iterator[bytes | memoryview]:
    """Yield a command as what is to be sent in turn; large words are not copied, as they are by hiredis."""
    head = b"*%d\r\n" % len(words)
    for word in words:
        body = word.encode() if isinstance(word, str) else word
        head += b"$%d\r\n" % len(body)
        if len(body) < _LARGE_BYTES:
            head += bytes(body) + b"\r\n"
            continue
        yield head
        yield from (body[start : start + _BLOCK_BYTES] for start in range(0, len(body), _BLOCK_BYTES))
        head = b"\r\n"
    yield head
