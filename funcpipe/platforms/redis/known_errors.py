"""Errors of a server, and advice about them: redis.io/docs/latest/develop/reference/protocol-spec."""

import re

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
    TimeoutError,
    TryAgainError,
)

from funcpipe.errors import FuncPipeError, PlatformRefused, StorageBusy, StorageError

_REFUSED: dict[type[RedisError], str] = {
    AuthenticationError: "set REDIS_PASSWORD, and REDIS_USERNAME where the server has users",
    AuthorizationError: "set REDIS_PASSWORD, and REDIS_USERNAME where the server has users",
    NoPermissionError: "let the user do @read, @write, SELECT, SCAN and INFO on keys of the prefix",
    ReadOnlyError: "this server is a replica; give the address of its primary",
    MovedError: "the server is part of a cluster, whose nodes hold some keys each; give a server that is not",
    AskError: "the server is part of a cluster, whose nodes hold some keys each; give a server that is not",
}
_FULL = (
    "the server's memory is full; raise its maxmemory, delete runs that are over (funcpipe run clean), or train with "
    "more stages or smaller micro-batches"
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
