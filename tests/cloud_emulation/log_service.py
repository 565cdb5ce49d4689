"""Alibaba's Simple Log Service for tests: projects, log stores, indexes and searches, every signature checked.

After the documentation of the API of 2020-12-30 and of its request signatures; the project is in the name of the host.
A search is a phrase or words that are all in an entry, in its line or in a field that is indexed.
"""

import base64
import hashlib
import hmac
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.contract.oss_server import ACCESS_KEY, SECRET_KEY

_STORE = re.compile(r"/logstores/([a-z0-9][\w-]{2,62})(/index)?")
_MOST_AT_ONCE = 100


@dataclass
class Store:
    index: dict[str, Any] | None = None
    entries: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    status: int
    value: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


def call_of(method: str, path: str) -> str:
    """What the documentation calls a request."""
    verb = {"GET": "Get", "POST": "Create", "DELETE": "Delete"}[method]
    parts = urlsplit(path)
    if "query=" in parts.query:
        return "GetLogs"
    if parts.path.endswith("/index"):
        return f"{verb}Index"
    return f"{verb}LogStore" if parts.path.startswith("/logstores") else f"{verb}Project"


class LogProjects:
    """The projects of the account, each with its log stores."""

    def __init__(self) -> None:
        self.projects: dict[str, dict[str, Store]] = {}
        self.unfinished = 0  # how many of the next searches are not complete

    def has(self, project: str, store: str) -> bool:
        return store in self.projects.get(project, {})

    def keep(self, function: Mapping[str, Any], instance: str, events: Sequence[tuple[float, str]]) -> None:
        """What Function Compute writes of an instance's output to the function's log store."""
        config = function["logConfig"]
        for time_s, text in events:
            self.projects[config["project"]][config["logstore"]].entries.append(
                {
                    "__time__": str(int(time_s)),
                    "__time_ns_part__": str(int(time_s % 1 * 1e9)),
                    "__source__": "",
                    "__topic__": f"FCLogs:{function['functionName']}",
                    "functionName": function["functionName"],
                    "instanceID": instance,
                    "qualifier": "LATEST",
                    "versionId": "",
                    "message": f"{text}\n",
                }
            )

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes, *, refused: str | None) -> Answer:
        parts = urlsplit(path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not _is_signed(method, parts.path, query, headers, body):
            return _error(403, "SignatureNotMatch", "the signature does not match")
        if refused is not None:
            return _error(403, refused, "refused by the test")
        project = headers["Host"].partition(".")[0]
        if parts.path == "/":
            return self._of_project(method, project, body)
        if project not in self.projects:
            return _error(404, "ProjectNotExist", f"The Project does not exist : {project}")
        stores = self.projects[project]
        if (method, parts.path) == ("POST", "/logstores"):
            return _make_store(stores, json.loads(body))
        match = _STORE.fullmatch(parts.path)
        if match is None or match[1] not in stores:
            return _error(404, "LogStoreNotExist", f"logstore {parts.path} does not exist")
        if match[2]:
            return _of_index(method, stores[match[1]], body)
        return self._search(stores[match[1]], query) if "query" in query else Answer(200, {"logstoreName": match[1]})

    def _of_project(self, method: str, project: str, body: bytes) -> Answer:
        if method == "POST":
            assert json.loads(body)["projectName"] == project
            assert re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", project)
            if project in self.projects:
                return _error(400, "ProjectAlreadyExist", "it exists")
            self.projects[project] = {}
        elif project not in self.projects:
            return _error(404, "ProjectNotExist", f"The Project does not exist : {project}")
        elif method == "DELETE":
            del self.projects[project]
        return Answer(200, {"projectName": project} if method == "GET" else None)

    def _search(self, store: Store, query: Mapping[str, str]) -> Answer:
        if store.index is None:
            return _error(400, "IndexConfigNotExist", "logstore without index config")
        assert query["type"] == "log"
        assert int(query["line"]) <= _MOST_AT_ONCE
        if self.unfinished:
            self.unfinished -= 1
            return Answer(200, [], {"x-log-progress": "Incomplete", "x-log-count": "0"})
        found = [
            entry
            for entry in store.entries
            if int(query["from"]) <= int(entry["__time__"]) < int(query["to"])
            and _matches(query["query"], entry, store.index)
        ]
        found.sort(key=lambda entry: int(entry["__time__"]), reverse=query["reverse"] == "true")
        first = int(query["offset"])
        page = found[first : first + int(query["line"])]
        return Answer(200, page, {"x-log-progress": "Complete", "x-log-count": str(len(page))})


def _make_store(stores: dict[str, Store], told: Mapping[str, Any]) -> Answer:
    assert 1 <= told["ttl"] <= 3650
    assert 1 <= told["shardCount"] <= 10
    if told["logstoreName"] in stores:
        return _error(400, "LogStoreAlreadyExist", "it exists")
    stores[told["logstoreName"]] = Store()
    return Answer(200)


def _of_index(method: str, store: Store, body: bytes) -> Answer:
    if method == "POST":
        if store.index is not None:
            return _error(400, "IndexAlreadyExist", "it exists")
        store.index = json.loads(body)
        return Answer(200)
    if store.index is None:
        return _error(404, "IndexConfigNotExist", "index config doesn't exist")
    return Answer(200, store.index)


def _matches(query: str, entry: Mapping[str, str], index: Mapping[str, Any]) -> bool:
    """Whether an entry has all words of all terms, wherever they stand; a term may be of one field that is indexed."""
    for term in query.split(" and "):
        match = re.fullmatch(r'(?:(\w+): ?)?"([^"]*)"', term.strip())
        assert match is not None, query
        key = index["keys"][match[1]] if match[1] else index["line"]
        texts = [entry[match[1]]] if match[1] else [text for name, text in entry.items() if not name.startswith("__")]
        found = {word for text in texts for word in _words(text, key["token"])}
        if not _words(match[2], key["token"]) <= found:
            return False
    return True


def _words(text: str, delimiters: Sequence[str]) -> set[str]:
    return set(re.split("[" + re.escape("".join(delimiters)) + "]", text)) - {""}


def _is_signed(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> bool:
    """LOG signatures: HMAC-SHA1 of the method, the body's MD5, its type, the date, headers and the resource."""
    digest = hashlib.md5(body).hexdigest().upper() if body else ""
    if headers.get("Content-MD5", "") != digest or headers["x-log-bodyrawsize"] != str(len(body)):
        return False
    if abs(parsedate_to_datetime(headers["Date"]).timestamp() - time.time()) > 15 * 60:
        return False
    names = sorted(name.lower() for name in headers if name.lower().startswith(("x-log-", "x-acs-")))
    resource = path + ("?" + "&".join(f"{name}={query[name]}" for name in sorted(query)) if query else "")
    text = "\n".join(
        (
            method,
            digest,
            headers.get("Content-Type", ""),
            headers["Date"],
            *(f"{name}:{headers[name]}" for name in names),
            resource,
        )
    )
    signature = base64.b64encode(hmac.new(SECRET_KEY.encode(), text.encode(), "sha1").digest()).decode()
    return headers["Authorization"] == f"LOG {ACCESS_KEY}:{signature}"


def _error(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"errorCode": code, "errorMessage": message})
