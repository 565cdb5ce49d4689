"""A proxy that records who asks a cloud for what: by the credentials with which each request is signed."""

import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from tests.contract.faulty_proxy import Exchange, Fault, FaultyProxy

_CREDENTIAL = re.compile(r"Credential=([^/,]+)")


@dataclass(frozen=True)
class Request:
    """What `who`, an access key, has asked for; `path` has no query, `query` the first value of each option.

    `action` is what Alibaba Cloud's SDKs call the operation, `copied` the object that a put copies.
    """

    who: str
    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    body: bytes
    action: str
    copied: str

    @property
    def options(self) -> dict[str, str]:
        """The query as a mapping."""
        return dict(self.query)

    def deleted_keys(self) -> list[str]:
        """The keys in the body of a request that deletes several objects."""
        return [
            unquote(str(item.text)) for item in ElementTree.fromstring(self.body).iter() if item.tag.endswith("Key")
        ]


class RecordingProxy(FaultyProxy):
    """Passes every request on, and keeps it in `seen`."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.seen: list[Request] = []

    def next_fault(self, connection: socket.socket) -> Fault:
        """What takes the next request: it is recorded, and passed on."""
        return self._pass_on

    def _pass_on(self, exchange: Exchange) -> None:
        parts = urlsplit(exchange.path)
        found = _CREDENTIAL.search(exchange.headers.get("Authorization", ""))
        query = parse_qs(parts.query, keep_blank_values=True)
        self.seen.append(
            Request(
                who=found[1] if found else "",
                method=exchange.command,
                path=unquote(parts.path),
                query=tuple((name, values[0]) for name, values in query.items()),
                body=exchange.body,
                action=exchange.headers.get("x-acs-action", ""),
                copied=unquote(exchange.headers.get("x-amz-copy-source", "")),
            )
        )
        exchange.relay()
